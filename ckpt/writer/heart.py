"""The heartbeat of a launch, in a thread of rank 0's writer, so that a busy trainer can't delay it."""

import threading
from collections.abc import Callable

from ckpt import liveness
from ckpt.store import Store


class Heart:
    """Rewrites the launch's beat file every `beat_s` seconds until stopped."""

    def __init__(self, store: Store, launch: int, beat_s: float, say: Callable[[str], None]) -> None:
        self._store = store
        self._launch = launch
        self._beat_s = beat_s
        self._say = say
        self._counter = 0
        self._step: int | None = None
        self._phase = liveness.TRAINING
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def at_step(self, step: int) -> None:
        """What the next beats say of training's step."""
        self._step = step

    def drain(self) -> None:
        """The trainer is gone: say so at once, and in all further beats."""
        self._phase = liveness.DRAINING
        self._wake.set()

    def stop(self, timeout: float) -> None:
        """Stop beating; a beat that hangs in the storage is waited for no longer than `timeout` seconds."""
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        failing = False
        while not self._stopped:
            self._wake.clear()
            self._counter += 1
            try:
                liveness.beat(self._store, self._launch, self._counter, step=self._step, phase=self._phase)
                failing = False
            except Exception as error:
                if not failing:
                    self._say(f"the heartbeat of launch {self._launch} can't be written: {error}")
                failing = True
            self._wake.wait(self._beat_s)
