"""`python -m fedfuse`: the command line without its script."""

from fedfuse.cli import main

main()
