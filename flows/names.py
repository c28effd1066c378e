"""Two-word names for runs and their Prefect flow runs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

_FIRST = [
    "amber", "bold", "brave", "bright", "brisk", "calm", "careful", "cheerful", "clear", "clever",
    "cosy", "curious", "daring", "deft", "eager", "early", "fair", "fearless", "fine", "fleet", "fresh",
    "gentle", "glad", "golden", "hardy", "honest", "humble", "keen", "kind", "lively", "lucky", "mellow",
    "merry", "mighty", "mild", "neat", "noble", "patient", "plucky", "polite", "proud", "quick", "quiet",
    "rapid", "ready", "robust", "rosy", "sharp", "shiny", "silver", "sleek", "smart", "snug", "solid",
    "spry", "steady", "sunny", "swift", "tidy", "tough", "trusty", "upbeat", "vivid", "warm", "wise",
    "witty", "young", "zesty",
]  # fmt: skip
_SECOND = [
    "alpaca", "ant", "badger", "bat", "bear", "bee", "beetle", "bison", "bittern", "carp", "cat",
    "cheetah", "condor", "crane", "cricket", "crow", "deer", "dingo", "dolphin", "dove", "duck", "eagle",
    "egret", "eland", "elk", "falcon", "ferret", "finch", "fox", "frog", "gazelle", "gecko", "goose",
    "grouse", "gull", "hare", "hawk", "hedgehog", "heron", "ibex", "ibis", "jackdaw", "jay", "kestrel",
    "kite", "koala", "lark", "lemur", "linnet", "lion", "lizard", "llama", "lynx", "magpie", "marmot",
    "marten", "mole", "moose", "moth", "mouse", "newt", "ocelot", "orca", "oriole", "osprey", "otter",
    "owl", "oxen", "panda", "parrot", "pelican", "penguin", "pike", "plover", "pony", "puffin", "puma",
    "quail", "rabbit", "raven", "robin", "rook", "salmon", "seal", "shrew", "skua", "snail", "sparrow",
    "squid", "stork", "swan", "swift", "tapir", "tern", "tiger", "toad", "trout", "turtle", "vole",
    "walrus", "weasel", "whale", "wolf", "wren", "yak", "zebra",
]  # fmt: skip


def new_name(taken: Callable[[str], bool] = lambda _: False) -> str:
    """A name such as brave-otter for which `taken` is false."""
    chance = random.SystemRandom()
    for _ in range(100):
        name = f"{chance.choice(_FIRST)}-{chance.choice(_SECOND)}"
        if not taken(name):
            return name
    return f"{name}-{chance.randrange(10**6):06d}"


def as_run_name(text: str) -> str:
    """The nearest allowed run name to a flow run's name, which may hold anything."""
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._-]+", "-", text)) or new_name()
