"""Proving a checkpoint: what lies on storage, byte for byte, against what its manifest says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ckpt.checkpoint import Checkpoint
from ckpt.digest import CHUNK, chunk_digest
from ckpt.errors import Corrupt, NotCommitted
from ckpt.layout import Slice, Stored, file_key, header_size, parse_header
from ckpt.manifest import FileEntry, Manifest
from ckpt.names import split_checkpoint
from ckpt.run import read_run_file
from ckpt.store import Store, open_store

_THREADS = 4
_MAX_NAMED = 20


@dataclass(frozen=True)
class Report:
    """What a verification found: `problems` is empty exactly if `ok`; `nbytes` were read in `seconds`."""

    uri: str
    ok: bool
    problems: list[str]
    quick: bool
    nbytes: int
    seconds: float


def as_checkpoint(checkpoint_or_uri: Checkpoint | str) -> Checkpoint:
    """The checkpoint at the address of its folder; not looked at yet, but for the id of its run.

    Raises NotCommitted if the address is not that of a checkpoint, StorageError.
    """
    if isinstance(checkpoint_or_uri, Checkpoint):
        return checkpoint_or_uri
    uri = open_store(checkpoint_or_uri).uri
    split = split_checkpoint(uri)
    if split is None:
        raise NotCommitted(
            f"{uri} is not the folder of a checkpoint (step-...); "
            f"`python -m ckpt ls {uri}` lists those of a run"
        )
    run_uri, attempt = split
    store = open_store(run_uri)
    if not any(entry.name == attempt and entry.is_dir for entry in store.list()):
        raise NotCommitted(f"there is no checkpoint {uri}")
    found = read_run_file(store)
    step, launch = (int(number) for number in attempt.split("-")[1:3])
    return Checkpoint(run_uri, attempt, step, launch, run_id=found["id"] if found else None)


def verify(checkpoint_or_uri: Checkpoint | str, quick: bool = False, *, threads: int = _THREADS) -> Report:
    """Compare a checkpoint with its manifest: `quick` by the sizes of its files, else by every byte.

    What is wrong with the checkpoint comes back in the report. Raises NotCommitted for an address that is no
    checkpoint's, NewerFormat, and StorageError when the storage fails. Memory: one 16 MiB chunk per thread.
    """
    start = time.monotonic()
    checkpoint = as_checkpoint(checkpoint_or_uri)
    problems: list[str] = []
    done = 0
    try:
        manifest = checkpoint.manifest
    except (Corrupt, NotCommitted) as error:
        problems.append(str(error))
    else:
        store = checkpoint.store
        problems += check_sizes(store, manifest)
        if not quick and not problems:
            done = _check_content(store, manifest, threads, problems)
    if len(problems) > _MAX_NAMED:
        problems[_MAX_NAMED:] = [f"and {len(problems) - _MAX_NAMED} more"]
    return Report(checkpoint.uri, not problems, problems, quick, done, time.monotonic() - start)


def check_sizes(store: Store, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a checkpoint by their sizes alone. Raises StorageError."""
    problems = []
    for entry in manifest.files:
        key = f"{manifest.attempt}/{entry.name}"
        size = store.size(key)
        if size is None:
            problems.append(f"{key} is missing")
        elif size != entry.size:
            problems.append(f"{key} has {size} bytes, and its manifest says {entry.size}")
    return problems


def _check_content(store: Store, manifest: Manifest, threads: int, problems: list[str]) -> int:
    lock = threading.Lock()
    local = threading.local()
    done = 0

    def guarded(job: Callable[[], int]) -> None:
        nonlocal done
        try:
            count = job()
        except (FileNotFoundError, Corrupt) as error:
            with lock:
                problems.append(str(error))
        else:
            with lock:
                done += count

    def chunk(entry: FileEntry, index: int) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(CHUNK))
        key, at = f"{manifest.attempt}/{entry.name}", index * CHUNK
        view = local.buffer[: min(CHUNK, entry.size - at)]
        for _ in range(2):  # what was only damaged on its way is right the second time
            store.read_into(key, at, view)
            if chunk_digest(entry.digest_kind, view) == entry.chunks[index]:
                return len(view)
        raise Corrupt(
            f"{key}: chunk {index} (bytes {at} to {at + len(view)}) doesn't have the digest that its "
            f"manifest says"
        )

    def header(index: int) -> int:
        try:
            _check_header(store, manifest, index)
        except Corrupt:
            _check_header(store, manifest, index)
        return 0

    jobs: list[Callable[[], int]] = [partial(header, index) for index in range(len(manifest.files))]
    for entry in manifest.files:
        jobs += [partial(chunk, entry, index) for index in range(len(entry.chunks))]
    with ThreadPoolExecutor(max(1, min(threads, len(jobs)))) as pool:
        list(pool.map(guarded, jobs))
    problems.sort()
    return done


def _check_header(store: Store, manifest: Manifest, index: int) -> None:
    """Whether a shard's own header and the manifest tell the same of what lies where."""
    entry = manifest.files[index]
    key = f"{manifest.attempt}/{entry.name}"
    first = bytearray(min(8, entry.size))
    store.read_into(key, 0, memoryview(first))
    try:
        header = bytearray(header_size(bytes(first), entry.size))
        store.read_into(key, 0, memoryview(header))
        stored = parse_header(bytes(header), entry.size)
    except Corrupt as error:
        raise Corrupt(f"{key}: {error}") from error
    expected = _expected(manifest, index)
    for name in sorted({*stored, *expected}):
        if stored.get(name) != expected.get(name):
            raise Corrupt(f"{key}: its header and its manifest disagree on {name!r}")


def _expected(manifest: Manifest, index: int) -> dict[str, Stored]:
    expected = {}
    for key, info in manifest.tensors.items():
        for item in info.slices:
            if item.file == index and item.end > item.start:
                name = file_key(Slice(key, info.dtype, info.shape, item.offsets, item.shape))
                expected[name] = Stored(info.dtype, item.shape, item.start, item.end)
    return expected
