import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import manifest, names, sealed, values
from ckpt.errors import Corrupt, NewerFormat, StateError
from ckpt.manifest import build_manifest, parse_manifest, parse_part, part_bytes
from ckpt.sealed import seal, unseal
from ckpt.tiling import gap_or_overlap
from tests.ckpt import making


@pytest.fixture
def run(tmp_path):
    return making.run_at(tmp_path / "run")


def fields_of(run, world_size=1, **more):
    attempt = "step-000000050-00001-3f9c"
    return [
        making.part_fields(run, attempt, making.tensors(), rank=r, world_size=world_size, **more)[1]
        for r in range(world_size)
    ]


def parts_of(run, world_size=1, key=None, **more):
    return [part_bytes(signing_key=key, **fields) for fields in fields_of(run, world_size, **more)]


def test_a_manifest_says_what_the_parts_said(run):
    made = parse_manifest(build_manifest(parts_of(run, 2, metrics={"loss": 0.5, "bad": float("nan")})))
    assert (made.step, made.launch, made.world_size, made.run_id) == (50, 1, 2, run.id)
    assert made.metrics["loss"] == 0.5 and made.metrics["bad"] != made.metrics["bad"]
    assert [entry.name for entry in made.files] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    weight = made.tensors["model.weight"]
    assert weight.dtype == "float32" and weight.shape == (8, 3)
    assert [(item.file, item.offsets, item.shape) for item in weight.slices] == [
        (0, (0, 0), (4, 3)),
        (1, (4, 0), (4, 3)),
    ]
    assert made.tensors["model.none"].slices == () and made.tensors["model.none"].shape == (0, 3)
    assert values.decode(made.values["progress"]) == {"step": 50}
    assert set(made.values) == {"progress", "rng/rank-00000", "rng/rank-00001"}
    assert made.config == {"lr": 0.1} and made.nbytes == sum(entry.size for entry in made.files)


def test_whoever_builds_a_manifest_gets_the_same_bytes(run):
    parts = parts_of(run, 3)
    built = build_manifest(parts)
    assert build_manifest(parts[::-1]) == built
    again = [part_bytes(**dict(reversed(list(fields.items())))) for fields in fields_of(run, 3)]
    assert build_manifest(again) == built
    body = json.loads(built)
    assert built == json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda parts: parts[:1], "2 ranks in all"),
        (lambda parts: [parts[0], parts[0]], "ranks"),
        (lambda parts: [], "at least one"),
        (lambda parts: [parts[0], making.resealed(parts[1], lambda p: p.update(run_id="other"))], "run_id"),
        (lambda parts: [parts[0], making.resealed(parts[1], lambda p: p.update(world_size=3))], "world_size"),
        (lambda parts: [parts[0], making.resealed(parts[1], lambda p: p["tensors"].clear())], "cover only"),
        (
            lambda parts: [
                parts[0],
                making.resealed(parts[1], lambda p: p["tensors"]["model.weight"].update(shape=[9, 3])),
            ],
            "on a lower one",
        ),
        (
            lambda parts: [parts[0], making.resealed(parts[1], lambda p: p["values"].update(progress=3))],
            "differs from that of a lower rank",
        ),
    ],
)
def test_parts_that_do_not_make_up_one_checkpoint_are_refused(run, change, reason):
    with pytest.raises(Corrupt, match=reason):
        build_manifest(change(parts_of(run, 2)))


def test_every_changed_byte_of_a_part_or_manifest_is_noticed(run):
    part = parts_of(run)[0]
    for data, parse in ((part, parse_part), (build_manifest([part]), parse_manifest)):
        parse(data)
        for at in range(0, len(data), 7):
            changed = bytearray(data)
            changed[at] ^= 1
            with pytest.raises(Corrupt):
                parse(bytes(changed))
        for end in (0, 1, len(data) // 2, len(data) - 1):
            with pytest.raises(Corrupt):
                parse(data[:end])


def test_only_what_was_signed_with_the_key_is_taken(run):
    key = b"secret"
    signed = build_manifest(parts_of(run, key=key), key)
    assert parse_manifest(signed, key).step == 50
    assert parse_manifest(signed).step == 50
    with pytest.raises(Corrupt, match="another key"):
        parse_manifest(signed, b"other")
    unsigned = build_manifest(parts_of(run))
    with pytest.raises(Corrupt, match="not signed"):
        parse_manifest(unsigned, key)
    with pytest.raises(Corrupt, match="not signed"):
        build_manifest(parts_of(run), key)
    forged = making.resealed(signed, lambda body: body.update(run_id="mine"))
    with pytest.raises(Corrupt, match="not signed"):
        parse_manifest(forged, key)


def test_an_empty_signing_key_is_refused_rather_than_ignored(monkeypatch):
    monkeypatch.setenv(sealed.KEY_VARIABLE, "")
    with pytest.raises(StateError, match="empty"):
        sealed.signing_key()


def test_a_newer_format_is_refused_with_advice(run):
    part = making.resealed(parts_of(run)[0], lambda body: body.update(format=2))
    with pytest.raises(NewerFormat, match=r"format 2.*up to 1.*update"):
        parse_part(part)
    whole = making.resealed(build_manifest(parts_of(run)), lambda body: body.update(format=99))
    with pytest.raises(NewerFormat, match="update"):
        parse_manifest(whole)


def file_change(**changes):
    return lambda body: body["files"][0].update(changes)


def tensor_change(**changes):
    return lambda body: body["tensors"]["model.weight"].update(changes)


def slice_change(**changes):
    return lambda body: body["tensors"]["model.weight"]["slices"][0].update(changes)


HOSTILE = [
    lambda body: body.update(format="1"),
    lambda body: body.update(format=True),
    lambda body: body.update(attempt="../../etc"),
    lambda body: body.update(attempt="step-000000051-00001-3f9c"),
    lambda body: body.update(attempt=3),
    lambda body: body.update(step=-1),
    lambda body: body.update(step=True),
    lambda body: body.update(world_size=0),
    lambda body: body.update(run_id=""),
    lambda body: body.update(run_id="x" * 1000),
    lambda body: body.update(created="yesterday"),
    lambda body: body.update(created="2026-01-01T00:00:00"),
    lambda body: body.update(created="0001-01-01T00:00:00+23:59"),
    lambda body: body.update(created="9999-12-31T23:59:59-23:59"),
    lambda body: body.update(metrics=[1]),
    lambda body: body.update(metrics={"$set": [1]}),
    lambda body: body.update(costs={"$range": [0, 3, 1]}),
    lambda body: body.update(parent={"$tuple": [1]}),
    lambda body: body.update(parent="x"),
    lambda body: body.pop("config"),
    lambda body: body.update(files={}),
    lambda body: body.update(files=[{}]),
    lambda body: body.update(files=["a"]),
    lambda body: body.update(tensors=[]),
    lambda body: body.update(values=3),
    lambda body: body["files"].append(body["files"][0]),
    file_change(name="../rank-00000.safetensors"),
    file_change(name="/etc/passwd"),
    file_change(name="rank-00001.safetensors"),
    file_change(name="rank-0.safetensors"),
    file_change(name=["rank-00000.safetensors"]),
    file_change(size=-1),
    file_change(size=1 << 70),
    file_change(size=1 << 40),
    file_change(size=1.5),
    file_change(digest_kind="crc32"),
    file_change(digest_kind=None),
    file_change(digest="0" * 32),
    file_change(chunks=[]),
    file_change(chunks=["x" * 32]),
    file_change(chunks=None),
    file_change(extra=1),
    tensor_change(dtype="qint8"),
    tensor_change(dtype=[]),
    tensor_change(shape=[8]),
    tensor_change(shape=[8, -3]),
    tensor_change(shape=[1 << 62, 1 << 62]),
    tensor_change(shape=[8, True]),
    tensor_change(shape="83"),
    tensor_change(slices=[]),
    tensor_change(slices=[3]),
    tensor_change(extra=1),
    slice_change(file=1),
    slice_change(file=-1),
    slice_change(file=0.0),
    slice_change(start=-96),
    slice_change(end=1 << 50),
    slice_change(start=0),
    slice_change(offsets=[1, 0]),
    slice_change(offsets=[0]),
    slice_change(shape=[7, 3]),
    slice_change(offsets=[0, 0, 0], shape=[8, 3, 1]),
    lambda body: body["tensors"]["model.weight"]["slices"].append(
        body["tensors"]["model.weight"]["slices"][0]
    ),
    lambda body: body.update(aliases={"a": "nowhere"}),
    lambda body: body.update(aliases={"a": ["model.weight"]}),
]


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_hostile_manifests_get_a_clear_error(run, index):
    data = build_manifest(parts_of(run))
    with pytest.raises(Corrupt, match="a manifest"):
        parse_manifest(making.resealed(data, HOSTILE[index]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\x00" * 100,
        b"[" * 100_000,
        b'{"a":' * 50_000,
        seal({"a": 1}),
        seal({"format": 1}),
    ],
)
def test_what_is_no_manifest_at_all_gets_a_clear_error(data):
    for parse in (parse_manifest, parse_part):
        with pytest.raises(Corrupt):
            parse(data)


def test_deep_json_under_a_right_seal_is_refused():
    body = b'{"format":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    digest = sealed.chunk_digest("xxh3-128", body)
    with pytest.raises(Corrupt, match="not readable"):
        parse_manifest(body[:-1] + b',"~seal":{"digest":"xxh3-128:' + digest.encode() + b'"}}')


def test_sizes_are_bounded_before_anything_is_parsed(monkeypatch):
    monkeypatch.setattr(manifest, "MAX_MANIFEST", 10)
    monkeypatch.setattr(manifest, "MAX_PART", 10)
    for parse in (parse_manifest, parse_part):
        with pytest.raises(Corrupt, match="at most 10"):
            parse(b"x" * 11)


def test_a_part_that_could_not_be_read_back_is_refused_at_save(run):
    fields = fields_of(run)[0]
    for change, error in [
        ({"values": {"a": float("nan")}}, "not plain"),
        ({"values": {"a": {1, 2}}}, "not plain"),
        ({"lead": None}, "rank 0"),
        ({"step": 51}, "attempt"),
        ({"lead": {**fields["lead"], "metrics": {"f": print}}}, r"metrics\.f"),
    ]:
        with pytest.raises(StateError, match=error):
            part_bytes(**{**fields, **change})


def test_a_part_too_big_is_refused_at_save_with_its_size(run, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_PART", 1000)
    with pytest.raises(StateError, match="keep big data in tensors"):
        part_bytes(**fields_of(run)[0])


def test_a_rank_without_data_has_a_part_without_a_file(run):
    fields = fields_of(run, 2)
    alone = making.part_fields(run, fields[0]["attempt"], making.tensors(), rank=0, world_size=1)[1]
    lead = part_bytes(**{**alone, "world_size": 2})
    idle = part_bytes(**{**fields[1], "file": None, "tensors": {}})
    made = parse_manifest(build_manifest([lead, idle]))
    assert [entry.name for entry in made.files] == [names.shard_name(0)] and made.world_size == 2


def test_aliases_name_the_tensor_that_holds_the_data(run):
    fields = fields_of(run)[0]
    made = parse_manifest(
        build_manifest([part_bytes(**{**fields, "aliases": {"model.tied": "model.weight"}})])
    )
    assert made.aliases == {"model.tied": "model.weight"}


def test_a_seal_says_nothing_of_another_document():
    one, two = seal({"a": 1}), seal({"a": 2})
    mixed = one[: one.index(b',"~seal')] + two[two.index(b',"~seal') :]
    with pytest.raises(Corrupt, match="own digest"):
        unseal(mixed, "it")


def brute_force(shape, boxes):
    import numpy as np

    count = np.zeros(shape, dtype=int)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


@st.composite
def boxes_in(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
        boxes.append(
            (offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))
        )
    return shape, boxes


@settings(deadline=None, max_examples=300)
@given(boxes_in())
def test_a_tiling_is_exactly_what_covers_every_element_once(case):
    shape, boxes = case
    assert (gap_or_overlap(shape, boxes) is None) == brute_force(shape, boxes)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_tiling_by_thousands_of_ranks_is_checked_fast(axis):
    import time

    count = 5000
    shape = tuple(count if d == axis else 7 for d in range(2))
    boxes = [
        (tuple(i if d == axis else 0 for d in range(2)), tuple(1 if d == axis else 7 for d in range(2)))
        for i in range(count)
    ]
    start = time.monotonic()
    assert gap_or_overlap(shape, boxes) is None
    assert gap_or_overlap(shape, [*boxes[1:], boxes[1]]) == "overlap"
    assert time.monotonic() - start < 1
