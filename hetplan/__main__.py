"""`python -m hetplan`: the same as the `hetplan` script."""

from hetplan.cli.main import main

main()
