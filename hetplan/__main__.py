"""`python -m hetplan`: the same as the `hetplan` script."""

from hetplan.cli.start import main

main()
