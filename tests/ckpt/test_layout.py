import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import layout
from ckpt.digest import chunk_digest, file_digest, new_hasher
from ckpt.dtypes import CODES, DTYPES, dtype
from ckpt.errors import Corrupt, StateError
from ckpt.layout import ALIGNMENT, Slice, file_key, parse_header, part_tensors, plan_shard

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def whole(key, kind, shape):
    return Slice(key, kind, shape, (0,) * len(shape), shape)


def shard(plan):
    return plan.header + bytes(plan.size - len(plan.header))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=12))
def test_any_state_makes_a_valid_safetensors_file_without_gaps_and_naturally_aligned(tmp_path_factory, specs):
    import torch
    from safetensors.torch import load_file

    slices = [whole(f"t{i}", kind, shape) for i, (kind, shape) in enumerate(specs)]
    plan = plan_shard(slices)
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    path.write_bytes(shard(plan))
    loaded = load_file(path)
    solid = [item for item in slices if item.nbytes]
    assert set(loaded) == {item.key for item in solid}
    for item in solid:
        if not DTYPES[item.dtype].as_bytes:
            assert tuple(loaded[item.key].shape) == item.shape
            assert loaded[item.key].dtype == getattr(torch, item.dtype)
    at = len(plan.header)
    assert at % ALIGNMENT == 0
    for placed in plan.placed:
        assert placed.start == at and placed.end - at == placed.slice.nbytes
        assert placed.start % DTYPES[placed.slice.dtype].itemsize == 0
        at = placed.end
    assert at == plan.size
    stored = parse_header(shard(plan), plan.size)
    assert {key: (s.dtype, s.shape) for key, s in stored.items()} == {
        i.key: (i.dtype, i.shape) for i in solid
    }


def test_what_lies_in_the_file_is_what_safetensors_reads(tmp_path):
    from safetensors.numpy import load_file

    arrays = {"a": np.arange(6, dtype=np.int8), "b": np.arange(4, dtype=np.float64).reshape(2, 2)}
    plan = plan_shard([whole(key, str(array.dtype), array.shape) for key, array in arrays.items()])
    data = plan.header + b"".join(arrays[placed.slice.key].tobytes() for placed in plan.placed)
    (tmp_path / "x").write_bytes(data)
    loaded = load_file(tmp_path / "x")
    assert all(np.array_equal(loaded[key], array) for key, array in arrays.items())
    assert [placed.slice.key for placed in plan.placed] == ["b", "a"]


def test_every_dtype_of_torch_is_stored_or_refused_by_name():
    import torch

    for kind in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(kind).removeprefix("torch.")
        try:
            assert dtype(name, "model.w").itemsize == kind.itemsize
        except StateError as error:
            assert "model.w" in str(error) and name in str(error)
            assert name.startswith(("q", "bits", "int", "uint"))
    assert {"float32", "bfloat16", "complex128", "float8_e8m0fnu", "uint64"} <= set(DTYPES)
    assert len(CODES) == sum(not kind.as_bytes for kind in DTYPES.values())


def test_slices_are_named_by_offsets_and_never_collide():
    slices = [
        Slice("w", "float32", (4, 2), (0, 0), (2, 2)),
        Slice("w", "float32", (4, 2), (2, 0), (2, 2)),
        whole("v", "float32", (2,)),
        whole("w@2,0", "float32", (2,)),
        whole("w@0,0", "float32", ()),
        whole("__metadata__", "float32", (2,)),
    ]
    keys = [file_key(item) for item in slices]
    assert keys == ["w@0,0", "w@2,0", "v", "w@2,0@0", "w@0,0@", "__metadata__@0"]
    assert set(parse_header(shard(plan_shard(slices)), plan_shard(slices).size)) == set(keys)


def test_empty_slices_take_no_place_but_stay_described():
    slices = [whole("e", "float32", (0, 3)), whole("s", "int64", ())]
    plan = plan_shard(slices)
    assert [placed.slice.key for placed in plan.placed] == ["s"]
    tensors = part_tensors(slices, plan)
    assert tensors["e"] == {"dtype": "float32", "shape": [0, 3], "slices": []}
    assert tensors["s"]["slices"] == [{"offsets": [], "shape": [], "start": 4096, "end": 4104}]
    assert plan_shard([]).size == ALIGNMENT


@pytest.mark.parametrize(
    "slices",
    [
        [Slice("w", "float32", (4,), (3,), (2,))],
        [Slice("w", "float32", (4,), (-1,), (2,))],
        [Slice("w", "float32", (4,), (0, 0), (2,))],
        [whole("w", "qint8", (4,))],
        [whole("w", "float32", (4,)), whole("w", "float32", (4,))],
    ],
)
def test_slices_that_make_no_sense_are_refused_by_name(slices):
    with pytest.raises(StateError, match="w"):
        plan_shard(slices)


def forged(header, size=None, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = struct.pack("<Q", len(text) if length is None else length) + text
    return data, len(data) + (0 if size is None else size)


def entry(start, end, shape=(1,), kind="F32"):
    return {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "case",
    [
        forged({}, length=1 << 63),
        forged({}, length=(1 << 64) - 1),
        forged({}, length=200_000_000, size=1 << 40),
        forged({}, length=0),
        forged(b"{", 0),
        forged(b"[" * 100_000, 0),
        forged(b"\xff\xfe", 0),
        forged([]),
        forged({"a": 3}),
        forged({"a": entry(0, 4, kind="F99")}, 4),
        forged({"a": entry(0, 4, kind=["F32"])}, 4),
        forged({"a": entry(0, 4, shape=(-1, -1))}, 4),
        forged({"a": entry(0, 4, shape=(1.0,))}, 4),
        forged({"a": entry(0, 4, shape=(True,))}, 4),
        forged({"a": entry(0, 4, shape=(1 << 62, 1 << 62))}, 4),
        forged({"a": entry(0, 0, shape=(0,) * 1000)}, 0),
        forged({"a": entry(4, 8)}, 8),
        forged({"a": entry(0, 4), "b": entry(2, 6)}, 6),
        forged({"a": entry(0, 4), "b": entry(8, 12)}, 12),
        forged({"a": entry(0, 4)}, 8),
        forged({"a": entry(0, 4)}, 0),
        forged({"a": {**entry(0, 4), "data_offsets": [0]}}, 4),
        forged({"a": {**entry(0, 4), "data_offsets": "ab"}}, 4),
        forged({"__metadata__": 3}),
        forged({"__metadata__": {"stored_as_bytes": "["}}),
        forged({"__metadata__": {"stored_as_bytes": '{"a": {}}'}, "a": entry(0, 4)}, 4),
        (b"123", 3),
        (b"", 0),
    ],
)
def test_hostile_headers_are_refused(case):
    data, size = case
    with pytest.raises(Corrupt):
        parse_header(data, size)


def test_the_length_of_a_header_is_checked_before_any_of_it_is_read():
    with pytest.raises(Corrupt, match="claims a header"):
        layout.header_size(struct.pack("<Q", 1 << 40), 1 << 50)


@pytest.mark.parametrize("kind", ["xxh3-128", "blake3"])
def test_digests_are_the_same_however_the_bytes_come(kind):
    data = bytes(range(256)) * 100
    hasher = new_hasher(kind)
    for at in range(0, len(data), 1000):
        hasher.update(memoryview(data)[at : at + 1000])
    assert hasher.hexdigest() == chunk_digest(kind, data) == chunk_digest(kind, bytearray(data))
    parts = [chunk_digest(kind, data[:5]), chunk_digest(kind, data[5:])]
    assert file_digest(kind, parts) == chunk_digest(kind, bytes.fromhex(parts[0] + parts[1]))
    assert file_digest(kind, parts) != file_digest(kind, parts[::-1])


def test_an_unknown_digest_is_refused_with_those_there_are():
    with pytest.raises(StateError, match="blake3"):
        new_hasher("md5")
