"""`python -m flows.evaluate run=NAME [which=latest|best|step:N|alias:NAME]`: score a checkpoint."""

import sys

from flows.cli import main

if __name__ == "__main__":
    sys.exit(main("evaluate"))
