"""Aggregators: every one is a weighted mean; they differ in where they take it."""
