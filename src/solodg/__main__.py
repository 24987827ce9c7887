"""`python -m solodg`."""

from solodg.cli import main

main()
