"""`python -m bench NAME`."""

import sys

from bench.core.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
