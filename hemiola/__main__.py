"""`python -m hemiola` is the `hemiola` command."""

from hemiola.cli import main

main()
