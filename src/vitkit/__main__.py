"""`python -m vitkit` is the command `vitkit`; torchrun starts it this way."""

import sys

from vitkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
