"""A trainer for tests: does what single lines of JSON on stdin tell it, and answers each with one line."""

import json
import os
import signal
import sys
from dataclasses import asdict

from ckpt.run import open_run
from tests.ckpt.writing import Saver


def main() -> None:
    settings = json.loads(sys.argv[1])
    saver = Saver(
        open_run(settings["uri"], create=False),
        rank=settings["rank"],
        world_size=settings["world_size"],
        **settings["options"],
    )
    answer(writer=saver.client.pid)
    attempt = ""
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "begin":
            attempt = saver.begin(*arguments)
            answer(attempt=attempt)
        elif command == "stage":
            saver.stage(1, int(arguments[0] * saver.layout.size))
            answer()
        elif command == "seal":
            saver.seal(attempt)
            answer()
        elif command == "commit":
            saver.client.commit(attempt, saver.world_size)
            answer()
        elif command == "event":
            event = saver.event()
            answer(event=type(event).__name__, **asdict(event))
        elif command == "fork":
            child = os.fork()
            if child == 0:
                signal.pause()
            answer(child=child)
        elif command == "save":
            attempt, event = saver.save(*arguments)
            answer(attempt=attempt, event=type(event).__name__, committed=str(saver.commit(attempt)))


def answer(**fields) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
