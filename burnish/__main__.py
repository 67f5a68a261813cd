"""``python -m burnish`` is the command line, as torchrun starts it."""

from burnish.cli.main import main

main()
