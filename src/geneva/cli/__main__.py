"""`python -m geneva.cli`: the `geneva` command."""

from geneva.cli import main

main()
