"""`python -m ckpt`: look at, verify and tend the checkpoints of a run."""

import sys

from ckpt.cli import main

sys.exit(main())
