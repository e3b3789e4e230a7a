"""`python -m vitkit`, as torchrun starts it."""

import sys

from vitkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
