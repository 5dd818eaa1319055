"""The command line."""

from fedfuse.cli.app import app, main

__all__ = ["app", "main"]
