"""Alignment: hidden units are moved to common places before any aggregator takes its mean."""
