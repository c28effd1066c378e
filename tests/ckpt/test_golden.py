import json
import re
import shutil

import numpy as np
import pytest

import ckpt
from ckpt import manifest, values
from ckpt.errors import NewerFormat
from ckpt.names import MANIFEST, part_name
from ckpt.store import open_store
from tests.ckpt import golden, making

ATTEMPTS = [golden.ATTEMPT, golden.BLAKE3_ATTEMPT, golden.ABANDONED]


@pytest.fixture
def run_uri(tmp_path):
    """A copy, so that nothing a test does can change what format 1 wrote."""
    shutil.copytree(golden.FOLDER, tmp_path / "run")
    return str(tmp_path / "run")


def read(checkpoint):
    """The tensors of a checkpoint as NumPy arrays, read by nothing but the manifest and plain file access."""
    found, arrays = checkpoint.manifest, {}
    for key, info in found.tensors.items():
        array = np.zeros(info.shape, dtype=info.dtype)
        for item in info.slices:
            data = open_store(checkpoint.uri).read(found.files[item.file].name)[item.start : item.end]
            box = tuple(slice(o, o + n) for o, n in zip(item.offsets, item.shape, strict=True))
            array[box] = np.frombuffer(data, dtype=info.dtype).reshape(item.shape)
        arrays[key] = array
    return arrays


def test_what_format_1_wrote_stays_readable(run_uri):
    line = ckpt.checkpoints(run_uri)
    assert [(item.attempt, item.abandoned) for item in line] == [(a, a == golden.ABANDONED) for a in ATTEMPTS]
    latest = ckpt.latest_valid(run_uri)
    assert latest.attempt == golden.ATTEMPT and (latest.step, latest.launch) == (50, 2)
    assert all(ckpt.verify(item).ok for item in line)
    expected = golden.state()
    for checkpoint in line[:2]:
        found = read(checkpoint)
        assert set(found) == set(expected)
        for key, array in expected.items():
            assert found[key].dtype == array.dtype and np.array_equal(found[key], array), key
    assert latest.metrics == golden.METRICS and latest.manifest.config == {"lr": 0.1}
    assert latest.manifest.parent == {"attempt": golden.BLAKE3_ATTEMPT, "step": 40, "launch": 1}


def test_the_values_that_format_1_wrote_come_back_equal(run_uri):
    found = values.decode(ckpt.latest_valid(run_uri).manifest.values["progress"])
    expected = dict(golden.VALUES)
    assert list(found) == list(expected)
    assert np.array_equal(found.pop("array"), expected.pop("array"))
    assert found == expected and str(found["floats"]) == str(expected["floats"])


def test_todays_code_writes_what_format_1_wrote(run_uri, tmp_path):
    for attempt in ATTEMPTS:
        store = open_store(f"{run_uri}/{attempt}")
        whole = store.read(MANIFEST)
        world_size = json.loads(whole)["world_size"]
        assert manifest.build_manifest([store.read(part_name(rank)) for rank in range(world_size)]) == whole
    golden.write(tmp_path / "new" / "format-1")
    old_id, new_id = (
        json.loads((path / "run.json").read_bytes())["id"]
        for path in (golden.FOLDER, tmp_path / "new" / "format-1")
    )

    def without_ids(folder, run_id):
        return {
            name: data and re.sub(rb'"~seal".*|"created":"[^"]*"', b"", data.replace(run_id.encode(), b"ID"))
            for name, data in making.tree_digest(folder).items()
        }

    assert without_ids(tmp_path / "new" / "format-1", new_id) == without_ids(golden.FOLDER, old_id)


def test_safetensors_itself_reads_what_format_1_wrote(run_uri):
    from safetensors.numpy import load_file

    found = load_file(f"{run_uri}/{golden.BLAKE3_ATTEMPT}/rank-00000.safetensors")
    expected = golden.state()
    odd = expected.pop("model.odd")
    assert np.array_equal(found.pop("model.odd").view(np.complex128).reshape(odd.shape), odd)
    expected.pop("model.none")
    assert set(found) == set(expected)
    assert all(np.array_equal(found[key], array) for key, array in expected.items())


def test_the_next_format_is_refused_with_advice_not_misread(run_uri):
    path = open_store(run_uri).path(f"{golden.ATTEMPT}/{MANIFEST}")
    path.write_bytes(making.resealed(path.read_bytes(), lambda body: body.update(format=2)))
    with pytest.raises(NewerFormat, match=r"format 2, and this version reads up to 1: update"):
        ckpt.latest_valid(run_uri)
