"""Waiting for what another process does, with a deadline."""

import time


def until(true, seconds, what):
    """Wait until ``true()``; fails after ``seconds``, naming what never came."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return found
