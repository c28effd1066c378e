"""Making one staged shard durable: blocks are hashed and written as they are staged, then sealed by a part.

Order matters and is the whole point: the shard's bytes, made durable, a look at their size, in an object
store at the bytes themselves, and only when the trainer has sealed the attempt the part that says all this.
"""

import errno
import threading
import time
from collections.abc import Callable
from typing import Any

from ckpt import digest, manifest, names, values
from ckpt.arena import pages
from ckpt.errors import CheckpointError, Corrupt, StorageError
from ckpt.sealed import signing_key
from ckpt.store import Sink, Store
from ckpt.writer.bounce import Buffers, copy_hashing
from ckpt.writer.options import WriterOptions
from ckpt.writer.priority import lower_this_thread, start_obstore_low
from ckpt.writer.retry import errno_of, retrying
from ckpt.writer.save import Save
from ckpt.writer.throttle import Throttle

CHUNK = digest.CHUNK
_CONFIRMING = 4


class Persister:
    """Persists the attempts of one rank; `say` gets lines worth showing."""

    def __init__(self, store: Store, rank: int, options: WriterOptions, say: Callable[[str], None]) -> None:
        self.store = store
        self.rank = rank
        self.options = options
        self.say = say
        self.block = _block_size(options)
        self.throttle = Throttle(options.bandwidth_limit, burst=self.block)
        self.buffers = Buffers(self.block) if Buffers.pay() else None
        if store.uri.startswith("s3://"):
            start_obstore_low()

    def check_run(self, save: Save) -> None:
        """Raise StorageError if the run was removed or renamed: what is written there now would be lost."""
        size = retrying(lambda: self.store.size(names.RUN_FILE), self.options.retry_s, save.pause)
        if size is None:
            raise StorageError(
                f"the run folder {self.store.uri} is gone (there is no {names.RUN_FILE} any more): put it "
                "back, or close the manager and open a new run"
            )

    def persist(self, save: Save) -> None:
        """Write the shard and, once sealed, the part. Raises VoidError, OSError or StorageError."""
        entry = retrying(lambda: self._write_shard(save), self.options.retry_s, save.pause)
        part = dict(save.wait_sealed())
        part["file"] = entry
        part.setdefault("tensors", save.tensors)
        lead = values.decode(part.get("lead"))
        if lead is not None:
            costs = {"persist_s": time.monotonic() - save.begun, **(lead.get("costs") or {})}
            part["lead"] = {**lead, "costs": costs}
        data = manifest.part_bytes(signing_key=signing_key(), **part)
        retrying(lambda: self._create_part(save, data), self.options.retry_s, save.pause)
        save.durable = True

    def discard(self, attempt: str) -> None:
        """Remove this rank's files of an attempt that is no checkpoint; a committed one stays untouched.

        Once its part is there, a rank other than 0 takes nothing back: rank 0's writer may be about to commit
        it. Only that one, which knows, removes what is durable (`Committer.clear`).
        """
        if self.store.size(f"{attempt}/{names.MANIFEST}") is not None:
            return
        part = f"{attempt}/{names.part_name(self.rank)}"
        if self.rank != 0 and self.store.size(part) is not None:
            return
        # The part first: without it the shard can't be taken for whole by anybody.
        self.store.delete(part)
        self.store.delete(f"{attempt}/{names.shard_name(self.rank)}")
        self.store.remove_if_empty(attempt)

    def explain(self, save: Save, error: BaseException) -> str:
        """What failed, with the numbers that help where the storage is full."""
        text = f"{save.attempt}, rank {self.rank}: {error}"
        if errno_of(error) in (errno.ENOSPC, errno.EDQUOT):
            free = self.store.free()
            known = "how many are free is unknown" if free is None else f"{free} are free"
            text += f"; this rank's shard needs {save.size} bytes, {known} in {self.store.uri}"
        return text

    def _write_shard(self, save: Save) -> dict[str, Any]:
        """Write the shard from its first byte anew, and return the part's `file` entry.

        A transient error starts it over: the arena still holds every byte, and after a failed write or fsync
        nothing is known about what an old file holds.
        """
        name = names.shard_name(self.rank)
        self.store.make_dir(save.attempt)
        key = f"{save.attempt}/{name}"
        self.store.delete(key)
        sink = self.store.open_sink(key, save.size, direct=self.options.direct, say=self.say)
        try:
            chunks = _Crew(self, save, sink).run()
            sink.finish()
        finally:
            sink.close()
        kind = self.options.digest
        entry = manifest.FileEntry(name, save.size, kind, digest.file_digest(kind, chunks), tuple(chunks))
        if sink.reread and self.options.confirm == "digest":
            self._confirm(save, entry)
        return {**entry._asdict(), "chunks": chunks}

    def _confirm(self, save: Save, entry: manifest.FileEntry) -> None:
        """Read a shard back. Raises StorageError, as transient, if it is not what was written."""
        # Imported where it is needed: a run in a folder never does this.
        from ckpt.reader import read_chunks

        def take(block: memoryview, _: int) -> None:
            if not save.urgent:
                lower_this_thread()
            save.pause(self.throttle.reserve(len(block)))

        try:
            read_chunks(self.store, save.attempt, entry.name, entry, take, threads=_CONFIRMING)
        except Corrupt as error:
            cause = OSError(errno.EAGAIN, "the storage holds something else than was written")
            raise StorageError(f"{cause.strerror}: {error}") from cause

    def _create_part(self, save: Save, data: bytes) -> None:
        key = f"{save.attempt}/{names.part_name(self.rank)}"
        if not self.store.create(key, data) and self.store.read(key) != data:
            raise CheckpointError(f"{key} exists already in {self.store.uri} and is not this save's")


class _Crew:
    """The threads that hash and write the blocks of one shard.

    They start at low priority; when the attempt becomes urgent they retire at their next block, and fresh
    threads at normal priority take over (a thread can't be raised again without a privilege).
    """

    def __init__(self, persister: Persister, save: Save, sink: Sink) -> None:
        self._persister = persister
        self._save = save
        self._sink = sink
        self._count = -(-save.size // CHUNK)
        self._next = 0
        self._digests: list[str] = [""] * self._count
        self._error: BaseException | None = None
        self._alive = 0

    def run(self) -> list[str]:
        """Write all blocks; the hex digest of each chunk, in order. Raises the first error of any thread."""
        changed = self._save.changed
        with changed:
            low = not self._save.urgent
            threads = self._start(low)
            while self._alive or (low and self._save.urgent):
                if low and self._save.urgent:
                    low = False
                    threads += self._start(low)
                changed.wait()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self._digests

    def _start(self, low: bool) -> list[threading.Thread]:
        number = min(self._persister.options.threads, self._count)
        threads = [threading.Thread(target=self._work, args=(low,), daemon=True) for _ in range(number)]
        self._alive += number
        for thread in threads:
            thread.start()
        return threads

    def _work(self, low: bool) -> None:
        try:
            if low:
                lower_this_thread()
            while (index := self._take(low)) is not None:
                self._write_chunk(index)
        except BaseException as error:
            with self._save.changed:
                self._error = self._error or error
            # Another thread may wait for what this one was to write.
            self._sink.abandon()
        finally:
            with self._save.changed:
                self._alive -= 1
                self._save.changed.notify_all()

    def _take(self, low: bool) -> int | None:
        with self._save.changed:
            if self._error is not None or self._next == self._count or (low and self._save.urgent):
                return None
            self._next += 1
            return self._next - 1

    def _write_chunk(self, index: int) -> None:
        save, persister = self._save, self._persister
        start = index * CHUNK
        end = min(start + CHUNK, save.size)
        save.wait_staged(end)
        memory = save.arena.padded
        hasher = digest.new_hasher(persister.options.digest)
        buffers = persister.buffers if self._sink.direct else None
        bounce = None if buffers is None else buffers.take()
        try:
            for offset in range(start, pages(end), persister.block):
                block = memory[offset : min(offset + persister.block, pages(end))]
                if bounce is None:
                    hasher.update(block[: end - offset])
                else:
                    copy_hashing(block, bounce, hasher, end - offset)
                    block = bounce[: len(block)]
                save.pause(persister.throttle.reserve(len(block)))
                self._sink.write(block, offset)
        finally:
            if buffers is not None and bounce is not None:
                buffers.give_back(bounce)
        self._digests[index] = hasher.hexdigest()


def _block_size(options: WriterOptions) -> int:
    """Bytes per write: with a bandwidth cap small enough that the cap is smooth over a tenth of a second."""
    if options.bandwidth_limit is None:
        return options.block
    mib = 1 << 20
    return min(options.block, max(mib, int(options.bandwidth_limit / 10) // mib * mib))
