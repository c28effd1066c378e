"""A stand-in for a flow: starts a trainer from a JSON specification, prints its events, waits for it.

``python -m tests.training.flow SPEC``; the first line is ``{"pids": [...]}`` once training has begun.
"""

import json
import sys
from pathlib import Path

from training.launch import LaunchSpec, TrainerProcess


def main():
    given = json.loads(Path(sys.argv[1]).read_text())
    given["log_dir"] = Path(given["log_dir"])
    trainer = TrainerProcess.start(LaunchSpec(**given))
    for event in trainer.events():
        if event["event"] == "step":
            event["pids"] = trainer.pids()
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
