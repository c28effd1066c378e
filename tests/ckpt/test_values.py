import collections
import dataclasses
import datetime as dt
import enum
import json
import math
import pathlib
import random
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import Corrupt, StateError
from ckpt.flatten import flatten
from ckpt.values import MAX_DEPTH, TensorRef, decode, encode

plain_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
keys = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=5)
)
trees = st.recursive(
    plain_scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=20,
)


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def same(one, two):
    """Equal in value, type, sign of zero, and order of keys; NaN equals NaN."""
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(two)) or (
            one == two and math.copysign(1, one) == math.copysign(1, two)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return same(list(one.items()), list(two.items()))
    return one == two


@settings(deadline=None)
@given(trees)
def test_plain_values_come_back_the_same_in_type_value_and_order(tree):
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        -(2**70),
        10**5000,
        float("inf"),
        -0.0,
        5e-324,
        "\ud800 lone surrogate",
        {"b": 1, "a": 2},
        {"$int": "0x1"},
        {"$": {"$tuple": []}},
        {(1, "x"): [()], 1.5: None},
        {1, 2, "three"},
        frozenset({(1, 2)}),
        1 + 2j,
        complex(float("inf"), -0.0),
        range(3, 30, 3),
        dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
        dt.date(2026, 1, 2),
        dt.time(1, 2, 3),
        dt.timedelta(days=-1, microseconds=3),
        pathlib.Path("/a b/ü"),
        [TensorRef("data.buffer"), {"at": TensorRef("x")}],
        random.Random(3).getstate(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_k7_k11_rarer_values_come_back_equal(value):
    back = there_and_back(value)
    assert back == value and type(back) is type(value)


def test_k11_a_value_of_five_megabytes_comes_back():
    value = {f"key {i}": [i, str(i) * 10, i / 3] for i in range(80_000)}
    assert there_and_back(value) == value


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Settings:
    lr: float
    path: pathlib.Path


Point = collections.namedtuple("Point", "x y")


class MyList(collections.UserList):
    pass


def test_k7_values_of_other_libraries_and_classes_are_made_plain():
    value = {
        "float": np.float64(1.5),
        "half": np.float16(0.1),
        "int": np.int32(7),
        "bool": np.bool_(True),
        "str": np.str_("s"),
        "enum": Colour.RED,
        "level": Level.HIGH,
        "dataclass": Settings(0.1, pathlib.Path("p")),
        "namespace": types.SimpleNamespace(a=1),
        "named": Point(1, 2),
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, x=[1]),
        "counter": collections.Counter("aab"),
        "userlist": MyList([1, 2]),
        "deque": collections.deque([1]),
        "bytearray": bytearray(b"x"),
    }
    back = there_and_back(value)
    assert back == {
        "float": 1.5,
        "half": float(np.float16(0.1)),
        "int": 7,
        "bool": True,
        "str": "s",
        "enum": "red",
        "level": 3,
        "dataclass": {"lr": 0.1, "path": pathlib.Path("p")},
        "namespace": {"a": 1},
        "named": (1, 2),
        "ordered": {"b": 1, "a": 2},
        "default": {"x": [1]},
        "counter": {"a": 2, "b": 1},
        "userlist": [1, 2],
        "deque": [1],
        "bytearray": b"x",
    }
    assert type(back["float"]) is float and type(back["int"]) is int and type(back["bool"]) is bool


def test_k7_config_objects_are_made_plain():
    from omegaconf import OmegaConf

    config = OmegaConf.create({"lr": 0.1, "twice": "${lr}", "items": [1, {"a": None}]})
    assert there_and_back(config) == {"lr": 0.1, "twice": 0.1, "items": [1, {"a": None}]}


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 3), dtype=np.int8),
        np.array(5, dtype=np.uint64),
        np.array([1, 2], dtype=">i4"),
        np.array(["a", "bcd"]),
        np.array(["2026-01-02"], dtype="datetime64[D]"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::3],
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_numpy_arrays_come_back_with_dtype_shape_and_writable(array):
    back = there_and_back(array)
    assert back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)
    assert back.flags.writeable


def test_k7_numpys_random_state_comes_back_usable():
    generator = np.random.RandomState(3)
    state = generator.get_state()
    expected = generator.random_sample(5)
    generator.set_state(there_and_back(state))
    assert np.array_equal(generator.random_sample(5), expected)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"param_groups": [{"lr": 0.1}, {"hook": print}]}, r"optim\.param_groups\[1\]\.hook"),
        ({"a": {3: [object()]}}, r"optim\.a\[3\]\[0\]"),
        ({"a": np.array([object()])}, r"optim\.a"),
        ({"a": {object(): 1}}, "the key"),
        ({"a": int}, r"optim\.a"),
        ({"a": np.datetime64(1, "ns")}, r"optim\.a"),
        ({"a": sys}, r"optim\.a"),
    ],
)
def test_what_cannot_be_made_plain_is_refused_by_its_full_name(value, name):
    with pytest.raises(StateError, match=name):
        encode(value, "optim")


Pair = collections.namedtuple("Pair", "a b")


class Own(collections.UserDict):
    pass


@dataclasses.dataclass
class Held:
    tensor: object


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda t: {t}, r"q\.k\.<member>: .* inside the set q\.k: .*; make it a plain list, or leave"),
        (lambda t: frozenset([t]), r"inside the frozenset q\.k: .*; make it a plain list,"),
        (lambda t: [Pair(1, t)], r"q\.k\[0\]\[1\]: .* inside the Pair q\.k\[0\]: .*; make it a plain tuple,"),
        (lambda t: collections.deque([t]), r"inside the deque q\.k: .*; make it a plain list,"),
        (lambda t: Held([t]), r"q\.k\.tensor\[0\]: .* inside the Held q\.k: .*; make it a plain dict,"),
        (lambda t: types.SimpleNamespace(x=t), r"inside the SimpleNamespace q\.k: .*; make it a plain dict,"),
        (lambda t: Own(x=t), r"q\.k\.x: .* inside the Own q\.k: .*; make it a plain dict,"),
        (lambda t: {t: 1}, r"as a dict's key: .*; make it a value,"),
    ],
)
def test_a_tensor_in_a_container_that_can_not_hold_one_is_told_with_what_can(made, said):
    state = {"q": {"k": made(torch.zeros(2))}}
    with pytest.raises(StateError, match=said):
        encode(flatten(state).values["q"], "q")


def test_a_generator_is_refused_with_what_to_give_instead():
    with pytest.raises(StateError, match=r"q\.k: a torch.*Generator .* generator\.get_state\(\)"):
        encode({"k": torch.Generator()}, "q")


def test_a_value_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(StateError, match="holds itself"):
        encode(value)


def test_keys_that_become_the_same_are_refused():
    with pytest.raises(StateError, match="the same"):
        encode({Colour.RED: 1, "red": 2})


def test_the_deepest_value_that_is_taken_can_be_read_back():
    value = "leaf"
    for level in range(MAX_DEPTH + 1):
        value = ([value], (value,), {"b": value, "a": 1})[level % 3]
    assert there_and_back(value) == value
    with pytest.raises(StateError, match="nested deeper"):
        encode([value])


@pytest.mark.parametrize(
    "tree",
    [
        {"$pickle": "x"},
        {"$array": ["|O", [1], "AAAA"]},
        {"$array": ["<f4", [1000, 1000], ""]},
        {"$array": ["<f4", [-1], "!!"]},
        {"$bytes": "***"},
        {"$int": "12z"},
        {"$tuple": 3},
        {"$dict": [[1]]},
        {"$dict": [[{"$dict": []}, 1]]},
        {"$datetime": "yesterday"},
        {"$complex": [1]},
        {"$float": "high"},
    ],
    ids=str,
)
def test_hostile_trees_are_refused(tree):
    with pytest.raises(Corrupt):
        decode([tree])


def test_a_hostile_depth_is_refused():
    tree = 1
    for _ in range(900):
        tree = [tree]
    with pytest.raises(Corrupt, match="nested deeper"):
        decode(tree)


def test_without_order_string_keys_make_plain_objects():
    assert encode({"b": 1, "a": (2,)}, ordered=False) == {"b": 1, "a": {"$tuple": [2]}}


def test_a_tensors_place_that_names_no_tensor_by_text_is_refused():
    for body in ([1], {"a": 1}, 3, None):
        with pytest.raises(Corrupt, match="no text"):
            decode({"$tensor": body})
