"""Memory in huge pages, where this system gives any: a disk takes large stretches of it in one piece.

A block of 16 MiB in pages of 4 KiB is 4,096 places in memory. A disk, and even more so a virtual machine's,
is handed and works through each of them; in pages of 2 MiB they are eight.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache
from pathlib import Path

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_LARGEST = 4 << 20  # with larger ones than that, a block is too small to be made of them
_MADV_HUGEPAGE = 14


@cache
def huge_page() -> int:
    """Bytes of a huge page of private memory; 0 where there is none to be had, or none of a useful size."""
    if _setting("enabled") not in ("always", "madvise"):
        return 0
    with suppress(OSError, ValueError):
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
        return size if mmap.PAGESIZE < size <= _LARGEST else 0
    return 0


@cache
def shared_is_huge() -> bool:
    """Whether shared memory (a memfd) that asks for huge pages can get them; most systems refuse."""
    return huge_page() > 0 and _setting("shmem_enabled") in ("always", "within_size", "advise", "force")


def private_memory(size: int) -> memoryview:
    """Zeroed memory of this process, in huge pages as far as there are any; freed with the last view of it.

    Page-aligned, and aligned to huge pages where these exist. Raises OSError (ENOMEM).
    """
    page = huge_page()
    region = mmap.mmap(-1, size + page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not page:
        return memoryview(region)[:size]
    with suppress(OSError):
        region.madvise(_MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % page
    return memoryview(region)[start : start + size]


def _setting(name: str) -> str:
    """The choice in brackets of one of the kernel's settings, "" where it has none."""
    try:
        text = (_SETTINGS / name).read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]
