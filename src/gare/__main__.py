"""`python -m gare`, for torchrun."""

from gare.cli.main import main

main()
