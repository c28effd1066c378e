"""What a manager's caller hands in, checked and made plain."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt import policies
from ckpt.errors import StateError
from ckpt.names import MAX_STEP
from ckpt.run import Run

# What every clock and lock of the platform can count to: some 30 years.
LONGEST_S = 10**9


def check_options(max_failed_saves: int, when_busy: str, slots: int, rank_timeout_s: float) -> None:
    """Raise StateError for options of a manager that make no sense."""
    if when_busy not in ("skip", "wait"):
        raise StateError(f"when_busy must be 'skip' or 'wait', not {when_busy!r}")
    for name, value in (("max_failed_saves", max_failed_saves), ("slots", slots)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StateError(f"{name} must be a whole number from 1 on, not {value!r}")
    _check_number("rank_timeout_s", rank_timeout_s, f"seconds above 0, up to {LONGEST_S}", LONGEST_S)
    if rank_timeout_s == 0:
        raise StateError("rank_timeout_s must be above 0 seconds, not 0")


def check_writer(threads: int, bandwidth_limit: float | None, posthumous_s: float) -> None:
    """Raise StateError for options of the writer that are no numbers."""
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise StateError(f"threads must be a whole number from 1 to 64, not {threads!r}")
    if bandwidth_limit is not None:
        _check_number("bandwidth_limit", bandwidth_limit, "bytes/s, or None for no limit", math.inf)
    _check_number("posthumous_s", posthumous_s, f"seconds from 0 to {LONGEST_S}", LONGEST_S)


def check_given(
    run: Any,
    state: Any,
    save: Any,
    keep: Any,
    config: Any,
    overrides: Any,
    say: Any,
    on_event: Any,
) -> None:
    """Raise StateError for what a manager is given and could not work with."""
    if not isinstance(run, Run) and (not isinstance(run, str) or not run.strip()):
        raise StateError(f"run must be an opened run or the address of one, not {run!r}")
    if not isinstance(state, Mapping):
        raise StateError(
            f'state must be a mapping of names to what is saved, such as {{"model": model}}, '
            f"not a {type(state).__name__}"
        )
    for name, policy, method in (("save", save, "should_save"), ("keep", keep, "keep")):
        if policy is not None:
            _check_policy(name, policy, method)
    if config is not None and not isinstance(config, Mapping):
        raise StateError(f"config must be a mapping, not a {type(config).__name__}")
    if isinstance(overrides, str | bytes) or not isinstance(overrides, Sequence):
        raise StateError(f"overrides must be a list of texts, not a {type(overrides).__name__}")
    for name, call in (("say", say), ("on_event", on_event)):
        if call is not None and not callable(call):
            raise StateError(f"{name} must be something to call, not a {type(call).__name__}")


def _check_policy(name: str, policy: Any, method: str) -> None:
    if isinstance(policy, policies.Any | policies.All):
        for part in policy.policies:
            _check_policy(name, part, method)
    elif isinstance(policy, type) or not callable(getattr(policy, method, None)):
        raise StateError(f"{name} must be a policy with a method {method}(), not {policy!r}")


def _check_number(name: str, value: Any, what: str, most: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= most:
        raise StateError(f"{name} must be {what}, not {value!r}")


def check_usable(closed: bool, went_on: bool = False) -> None:
    """Raise StateError for a manager that is closed, or that restores although it `went_on` already."""
    if closed:
        raise StateError(
            "this manager is closed, or was made before this process was forked: open another one to go on"
        )
    if went_on:
        raise StateError(
            "a launch goes on from one checkpoint, and this one has restored or saved already: close the "
            "manager, and restore with a new one"
        )


def plain_step(step: Any) -> int:
    """A training step as a plain int. Raises StateError for what no checkpoint can be named after."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= MAX_STEP:
        raise StateError(f"a step is a whole number from 0 to {MAX_STEP}, not {str(step)[:50]}")
    return number


def plain_timeout(timeout: Any) -> float | None:
    """Seconds that a wait can take, None for no end. Raises StateError for what is no time."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout):
        raise StateError(f"timeout must be seconds, or None, not {timeout!r}")
    return float(min(max(timeout, 0.0), LONGEST_S))


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics without tensors and NumPy scalars. Raises StateError for what is no number or text."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise StateError(f"metrics must map names to numbers, not be a {type(metrics).__name__}")
    return {str(name): _plain_metric(name, value) for name, value in metrics.items()}


def _plain_metric(name: Any, value: Any) -> Any:
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, TypeError, ValueError) as error:
            raise StateError(f"the metric {str(name)!r} is no single number: {error}") from error
    if value is not None and not isinstance(value, bool | int | float | str):
        raise StateError(f"the metric {str(name)!r} must be a number or a text, not a {type(value).__name__}")
    return value
