"""`python -m vitkit` is the command `vitkit`; torchrun starts it so."""

import sys

from vitkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
