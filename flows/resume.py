"""`python -m flows.resume run=NAME [overrides]`: go on with a run from its newest valid checkpoint."""

import sys

from flows.cli import main

if __name__ == "__main__":
    sys.exit(main("resume"))
