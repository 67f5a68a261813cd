"""``python -m burnish`` is the command line, as torchrun starts it."""

from burnish.cli import main

main()
