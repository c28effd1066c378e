"""A thread that does jobs one after the other."""

import os
import queue
import threading
import traceback
from collections.abc import Callable


class Lane:
    """Jobs run in the order in which they were added; a job handles the errors that can be expected.

    Any other one ends the process at once, with its traceback: the trainer learns of that, where it would
    wait in vain for the outcome of a job that a broken thread has dropped.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Return when all jobs added so far are done; nothing can be added afterwards."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
