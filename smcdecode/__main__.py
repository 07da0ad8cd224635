"""``python -m smcdecode``: the command line."""

import sys

from smcdecode.cli import main

if __name__ == "__main__":
    sys.exit(main())
