"""Sums over clients compiled: means, means in charts and power sums, each number read once."""
