"""`python -m flows.train [run=NAME] [overrides]`: train a new run."""

import sys

from flows.cli import main

if __name__ == "__main__":
    sys.exit(main("train"))
