"""How a writer process does its work; the same for every save of a launch."""

from dataclasses import asdict, dataclass
from typing import Any

from ckpt.errors import StateError

_MIB = 1 << 20


@dataclass(frozen=True)
class WriterOptions:
    """Knobs of the writer process.

    digest: `xxh3-128` or `blake3`. threads: how many blocks are hashed and written at once. block: bytes per
    write, whole MiB up to the 16 MiB of a digest's chunk. direct: try O_DIRECT. bandwidth_limit: bytes/s of
    this writer, None for no limit. posthumous_s: how long it may go on after its trainer's death. retry_s:
    how long transient storage errors are retried. beat_s: seconds between heartbeats. confirm: what has to be
    right before a shard in an object store counts as durable: `digest` (it is read back and compared) or
    `size` (it is only looked at, and damage is found by whoever reads it).
    """

    digest: str = "xxh3-128"
    threads: int = 2
    block: int = 16 * _MIB
    direct: bool = True
    bandwidth_limit: float | None = None
    posthumous_s: float = 120.0
    retry_s: float = 60.0
    beat_s: float = 5.0
    confirm: str = "digest"

    def __post_init__(self) -> None:
        """Refuse what the writer could not work with, before any process is started."""
        if self.digest not in ("xxh3-128", "blake3"):
            raise StateError(f"digest must be 'xxh3-128' or 'blake3', got {self.digest!r}")
        if self.confirm not in ("digest", "size"):
            raise StateError(f"confirm must be 'digest' or 'size', got {self.confirm!r}")
        if not 1 <= self.threads <= 64:
            raise StateError(f"writer threads must be 1 to 64, got {self.threads}")
        if self.block % _MIB or not _MIB <= self.block <= 16 * _MIB:
            raise StateError(f"block must be whole MiB from 1 to 16, got {self.block} bytes")
        if self.bandwidth_limit is not None and self.bandwidth_limit < _MIB:
            raise StateError(
                f"bandwidth_limit is in bytes/s and at least {_MIB} (1 MiB/s), got {self.bandwidth_limit}; "
                "null means no limit"
            )
        for name in ("posthumous_s", "retry_s", "beat_s"):
            if getattr(self, name) < 0:
                raise StateError(f"{name} must not be negative, got {getattr(self, name)}")

    def plain(self) -> dict[str, Any]:
        """The options as plain values, for the message to the writer."""
        return asdict(self)
