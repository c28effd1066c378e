"""The manifest, whose presence is the commit, and the per-rank parts of which it is a pure function."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt import values
from ckpt.digest import CHUNK, DEFAULT, file_digest, is_digest
from ckpt.dtypes import DTYPES
from ckpt.errors import Corrupt, NewerFormat, StateError
from ckpt.names import parse_attempt, shard_name, shard_rank
from ckpt.sealed import seal, unseal
from ckpt.tiling import gap_or_overlap

FORMAT = 1
MAX_PART = 64 << 20
"""Bytes that one rank's part may have."""
MAX_MANIFEST = 256 << 20
"""Bytes that a manifest may have."""

_LEAD = ("metrics", "parent", "config", "versions", "environment", "costs")
_COMMON = ("run_id", "attempt", "step", "launch", "world_size")


class FileEntry(NamedTuple):
    """A shard file: `size` in bytes, one digest per 16 MiB chunk, and `digest` over those."""

    name: str
    size: int
    digest_kind: str
    digest: str
    chunks: tuple[str, ...]


class SliceEntry(NamedTuple):
    """Where one box of a tensor lies: bytes `[start, end)` of `Manifest.files[file]`."""

    file: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    end: int


class TensorInfo(NamedTuple):
    """A stored tensor: dtype by torch's name, global shape, and slices that cover it exactly."""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[SliceEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint says about itself; `values` are still encoded (see `ckpt.values.decode`)."""

    run_id: str
    attempt: str
    step: int
    launch: int
    world_size: int
    created: str
    metrics: dict[str, Any]
    parent: dict[str, Any] | None
    config: Any
    versions: dict[str, Any]
    environment: dict[str, Any]
    costs: dict[str, Any]
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorInfo]
    aliases: dict[str, str]
    values: dict[str, Any]
    raw: bytes = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all shard files together."""
        return sum(entry.size for entry in self.files)


def part_bytes(*, signing_key: bytes | None = None, **fields: Any) -> bytes:
    """One rank's part as the bytes of its `rank-NNNNN.json`.

    `fields` are those of a part except `format`: rank, world_size, run_id, attempt, step, launch, file,
    tensors, aliases, values (each entry already encoded by `ckpt.values.encode`) and, on rank 0, lead (plain
    Python: created, metrics, parent, config, versions, environment, costs). Raises StateError for what can't
    be stored.
    """
    lead = fields.get("lead")
    if lead is not None:
        plain = {key: values.encode(lead.get(key), key, ordered=False) for key in _LEAD}
        lead = {**plain, "created": lead["created"]}
    kind = fields["file"]["digest_kind"] if fields.get("file") else DEFAULT
    body = {**fields, "format": FORMAT, "lead": lead}
    try:
        data = seal(body, kind, signing_key)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"the values of {fields.get('attempt')} are not plain: {error}") from error
    if len(data) > MAX_PART:
        raise StateError(
            f"what rank {fields.get('rank')} stores beside its tensors makes {len(data)} bytes of JSON, "
            f"where at most {MAX_PART} are taken: keep big data in tensors"
        )
    try:
        parse_part(data)
    except Corrupt as error:
        raise StateError(f"the part of rank {fields.get('rank')} can't be stored: {error}") from error
    return data


def parse_part(data: bytes, signing_key: bytes | None = None, what: str = "a rank's part") -> dict[str, Any]:
    """A checked part. Raises Corrupt with the reason, NewerFormat if a newer version wrote it."""
    if len(data) > MAX_PART:
        raise Corrupt(f"{what} has {len(data)} bytes, where at most {MAX_PART} make sense")
    part = unseal(data, what, signing_key)
    _check_format(part, what)
    check = _Check(what)
    check.common(part)
    rank: Any = part.get("rank")
    world = part["world_size"]
    check.that(type(rank) is int and 0 <= rank < world, f"rank {rank!r} of {world} ranks")
    entry = part.get("file")
    if entry is not None:
        check.file(entry)
        check.that(entry["name"] == shard_name(rank), f"rank {rank} names the file {entry['name']!r}")
    for name in ("tensors", "aliases", "values"):
        check.that(isinstance(part.get(name), dict), f"its {name} are no object")
    for key, info in part["tensors"].items():
        check.tensor(key, info, [entry] if entry else [], in_part=True)
    lead = part.get("lead")
    check.that((rank == 0) == (lead is not None), "rank 0, and only that, has to lead")
    if lead is not None:
        check.lead(lead)
    return part


def build_manifest(parts: Sequence[bytes], signing_key: bytes | None = None) -> bytes:
    """The manifest of a checkpoint, by the parts of all its ranks: whoever builds it gets the same bytes.

    Raises Corrupt if the parts don't make up one whole checkpoint: a rank is missing, they speak of different
    checkpoints, or a tensor is not covered exactly.
    """
    return merge_parts([parse_part(data, signing_key) for data in parts], signing_key)


def merge_parts(parts: Sequence[dict[str, Any]], signing_key: bytes | None = None) -> bytes:
    """As `build_manifest`, of parts that `parse_part` has checked."""
    parsed = sorted(parts, key=lambda part: part["rank"])
    if not parsed:
        raise Corrupt("a checkpoint needs at least one rank's part")
    first = parsed[0]
    for part in parsed:
        for key in _COMMON:
            if part[key] != first[key]:
                raise Corrupt(
                    f"the parts of ranks 0 and {part['rank']} differ in {key}: {first[key]}, {part[key]}"
                )
    ranks = [part["rank"] for part in parsed]
    if ranks != list(range(first["world_size"])):
        raise Corrupt(f"there are parts of the ranks {ranks}, and {first['world_size']} ranks in all")
    files: list[dict[str, Any]] = []
    tensors: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    entries: dict[str, Any] = {}
    for part in parsed:
        if part["file"] is not None:
            files.append(part["file"])
        _merge_tensors(tensors, part, len(files) - 1)
        _merge_equal(aliases, part["aliases"], "alias", part["rank"])
        _merge_equal(entries, part["values"], "entry", part["rank"])
    for info in tensors.values():
        info["slices"].sort(key=lambda item: (item["offsets"], item["file"]))
    body = {key: first[key] for key in _COMMON} | first["lead"]
    body |= {"format": FORMAT, "files": files, "tensors": tensors, "aliases": aliases, "values": entries}
    data = seal(body, files[0]["digest_kind"] if files else DEFAULT, signing_key)
    parse_manifest(data, signing_key, f"the manifest of {first['attempt']}")
    return data


def _merge_tensors(tensors: dict[str, Any], part: Mapping[str, Any], file: int) -> None:
    for key, info in part["tensors"].items():
        seen = tensors.setdefault(key, {"dtype": info["dtype"], "shape": info["shape"], "slices": []})
        if (seen["dtype"], seen["shape"]) != (info["dtype"], info["shape"]):
            raise Corrupt(
                f"tensor {key!r} is {info['dtype']}{info['shape']} on rank {part['rank']}, "
                f"but {seen['dtype']}{seen['shape']} on a lower one"
            )
        seen["slices"].extend({**item, "file": file} for item in info["slices"])


def _merge_equal(into: dict[str, Any], more: Mapping[str, Any], what: str, rank: int) -> None:
    for key, item in more.items():
        if key in into and into[key] != item:
            raise Corrupt(
                f"the {what} {key!r} of rank {rank} differs from that of a lower rank: "
                f"what differs between ranks has to be stored under names of its own"
            )
        into[key] = item


def parse_manifest(data: bytes, signing_key: bytes | None = None, what: str = "a manifest") -> Manifest:
    """A checked manifest. Raises Corrupt with the reason, NewerFormat if a newer version wrote it."""
    if len(data) > MAX_MANIFEST:
        raise Corrupt(f"{what} has {len(data)} bytes, where at most {MAX_MANIFEST} make sense")
    body = unseal(data, what, signing_key)
    _check_format(body, what)
    check = _Check(what)
    check.common(body)
    check.lead(body)
    check.that(isinstance(body.get("files"), list), "its files are no list")
    for entry in body["files"]:
        check.file(entry)
    names = [entry["name"] for entry in body["files"]]
    ranks = [shard_rank(name) for name in names]
    sane = all(rank is not None and rank < body["world_size"] for rank in ranks) and len(set(ranks)) == len(
        ranks
    )
    check.that(sane, "its files have names that can't be")
    for name in ("tensors", "aliases", "values"):
        check.that(isinstance(body.get(name), dict), f"its {name} are no object")
    for key, info in body["tensors"].items():
        check.tensor(key, info, body["files"], in_part=False)
    for alias, key in body["aliases"].items():
        check.that(isinstance(key, str) and key in body["tensors"], f"the alias {alias!r} names no tensor")
    return Manifest(
        **{key: body[key] for key in (*_COMMON, "created", "aliases", "values")},
        parent=check.decoded(body, "parent"),
        config=values.decode(body["config"]),
        metrics=check.decoded(body, "metrics") or {},
        versions=check.decoded(body, "versions") or {},
        environment=check.decoded(body, "environment") or {},
        costs=check.decoded(body, "costs") or {},
        files=tuple(FileEntry(**{**entry, "chunks": tuple(entry["chunks"])}) for entry in body["files"]),
        tensors={key: _tensor_info(info) for key, info in body["tensors"].items()},
        raw=data,
    )


def _tensor_info(info: Mapping[str, Any]) -> TensorInfo:
    slices = (
        SliceEntry(item["file"], tuple(item["offsets"]), tuple(item["shape"]), item["start"], item["end"])
        for item in info["slices"]
    )
    return TensorInfo(info["dtype"], tuple(info["shape"]), tuple(slices))


def _check_format(body: Mapping[str, Any], what: str) -> None:
    version = body.get("format")
    if type(version) is int and version > FORMAT:
        raise NewerFormat(
            f"{what} has format {version}, and this version reads up to {FORMAT}: "
            f"update the software that reads it"
        )
    if version != FORMAT or type(version) is not int:
        raise Corrupt(f"{what} has the unknown format {version!r}")


class _Check:
    """Holds the name of what is being checked, for the texts of errors."""

    def __init__(self, what: str) -> None:
        self._what = what

    def that(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise Corrupt(f"{self._what} makes no sense: {otherwise}")

    def common(self, body: Mapping[str, Any]) -> None:
        run_id, attempt = body.get("run_id"), body.get("attempt")
        self.that(isinstance(run_id, str) and 0 < len(run_id) <= 200, f"run id {str(run_id)[:50]!r}")
        for key, least in (("step", 0), ("launch", 1), ("world_size", 1)):
            number = body.get(key)
            self.that(type(number) is int and least <= number < 10**15, f"{key} {str(number)[:50]!r}")
        named = parse_attempt(attempt) if isinstance(attempt, str) else None
        self.that(
            named == (body["step"], body["launch"]),
            f"attempt {str(attempt)[:50]!r}, step {body['step']}, launch {body['launch']}",
        )

    def lead(self, body: Mapping[str, Any]) -> None:
        created = body.get("created")
        try:
            made = dt.datetime.fromisoformat(created)  # type: ignore[arg-type]
            aware = made.tzinfo is not None and made.astimezone(dt.UTC) is not None
        except (TypeError, ValueError, OverflowError):
            aware = False
        self.that(aware, f"created {str(created)[:50]!r}")
        for key in _LEAD:
            self.that(key in body, f"it has no {key}")
        for key in ("metrics", "versions", "environment", "costs"):
            self.that(body[key] is None or isinstance(body[key], dict), f"its {key} are no object")
        self.that(body["parent"] is None or isinstance(body["parent"], dict), "its parent is no object")

    def decoded(self, body: Mapping[str, Any], key: str) -> dict[str, Any] | None:
        found = values.decode(body[key])
        self.that(found is None or isinstance(found, dict), f"its {key} are no object")
        return found

    def file(self, entry: Any) -> None:
        keys = {"name", "size", "digest_kind", "digest", "chunks"}
        self.that(isinstance(entry, dict) and set(entry) == keys, "a file's entry has the wrong fields")
        name, size, kind, chunks = entry["name"], entry["size"], entry["digest_kind"], entry["chunks"]
        self.that(isinstance(name, str), "a file's name is no text")
        self.that(type(size) is int and 0 <= size < 1 << 62, f"the size of file {name[:50]!r}")
        self.that(
            isinstance(chunks, list)
            and len(chunks) == -(-size // CHUNK)
            and isinstance(kind, str)
            and all(is_digest(kind, chunk) for chunk in chunks)
            and is_digest(kind, entry["digest"]),
            f"the digests of file {name[:50]!r}",
        )
        self.that(
            file_digest(kind, chunks) == entry["digest"], f"the digests of file {name[:50]!r} contradict"
        )

    def tensor(self, key: str, info: Any, files: Sequence[Mapping[str, Any]], in_part: bool) -> None:
        short = repr(key[:200])
        fields = {"offsets", "shape", "start", "end"} | (set() if in_part else {"file"})
        sane = (
            isinstance(info, dict)
            and set(info) == {"dtype", "shape", "slices"}
            and isinstance(info["dtype"], str)
            and info["dtype"] in DTYPES
            and _is_shape(info["shape"])
            and isinstance(info["slices"], list)
            and all(isinstance(item, dict) and set(item) == fields for item in info["slices"])
        )
        self.that(sane, f"tensor {short} is described wrongly")
        shape, itemsize = info["shape"], DTYPES[info["dtype"]].itemsize
        for item in info["slices"]:
            file = 0 if in_part else item["file"]
            numbers = (file, item["start"], item["end"])
            self.that(
                all(type(n) is int for n in numbers) and 0 <= file < len(files), f"tensor {short} has no file"
            )
            fits = _is_shape(item["offsets"]) and _is_shape(item["shape"])
            fits = fits and len(item["offsets"]) == len(item["shape"]) == len(shape)
            fits = fits and all(
                o + n <= s for o, n, s in zip(item["offsets"], item["shape"], shape, strict=True)
            )
            self.that(fits, f"a slice of tensor {short} lies outside of it")
            size = math.prod(item["shape"]) * itemsize
            self.that(
                0 <= item["start"] <= item["end"] <= files[file]["size"]
                and item["end"] - item["start"] == size,
                f"a slice of tensor {short} has a byte range that can't be",
            )
        if not in_part:
            boxes = [(tuple(item["offsets"]), tuple(item["shape"])) for item in info["slices"]]
            problem = gap_or_overlap(tuple(shape), boxes)
            self.that(problem is None, f"the slices of tensor {short} {problem}")


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= 64
        and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    )


def summary(manifest: Manifest) -> dict[str, Any]:
    """What a person wants to know of a checkpoint, as plain JSON data."""
    return {
        "attempt": manifest.attempt,
        "step": manifest.step,
        "launch": manifest.launch,
        "run_id": manifest.run_id,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "bytes": manifest.nbytes,
        "tensors": len(manifest.tensors),
        "elements": sum(math.prod(info.shape) for info in manifest.tensors.values()),
        "values": sorted(manifest.values),
        "metrics": manifest.metrics,
        "parent": manifest.parent,
        "versions": manifest.versions,
        "environment": manifest.environment,
        "costs": manifest.costs,
        "config": manifest.config,
    }
