"""Experiments: one file describes them, a ledger records them, a killed run goes on where it stopped."""
