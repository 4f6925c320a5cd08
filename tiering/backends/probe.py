"""Which way to a drive works: direct I/O, or through the page cache. Found out, never assumed."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from tiering import fsops
from tiering.records import ALIGNMENT

_log = logging.getLogger(__name__)

_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a drive is read and written, and why."""

    direct: bool
    filesystem: str
    reason: str


def probe(folder: Path, *, sample: Path | None = None) -> Access:
    """Return how ``folder`` is best read and written.

    A scratch file is written directly and read back; a reader that may not write passes a
    ``sample`` file of the folder, which is only read.
    """
    filesystem = fsops.filesystem_type(folder)
    reason = _refusal(folder, sample, filesystem)
    access = Access(direct=not reason, filesystem=filesystem, reason=reason or "tried, works")
    if reason:
        _log.warning("%s (%s): buffered, not direct I/O: %s", folder, filesystem, reason)
    else:
        _log.info("%s (%s): direct I/O", folder, filesystem)
    return access


def _refusal(folder: Path, sample: Path | None, filesystem: str) -> str:
    if filesystem in _MEMORY:
        return f"{filesystem} is memory, and counts as memory"
    try:
        if sample is not None:
            return _try_read(sample)
        return _try_round_trip(folder)
    except OSError as error:
        return f"trial failed: {error.strerror}"


def _try_read(sample: Path) -> str:
    fd = os.open(sample, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, ALIGNMENT) as page:
            os.preadv(fd, [page], 0)
        return _alignment_refusal(fd)
    finally:
        os.close(fd)


def _try_round_trip(folder: Path) -> str:
    fd = open_unnamed(folder, os.O_DIRECT)
    try:
        refusal = _alignment_refusal(fd)
        return refusal or ("" if _round_trip(fd) else "what was written does not read back")
    finally:
        os.close(fd)


def _round_trip(fd: int) -> bool:
    pattern = secrets.token_bytes(ALIGNMENT)
    with mmap.mmap(-1, 2 * ALIGNMENT) as pages:
        pages[:ALIGNMENT] = pattern
        with memoryview(pages) as view:
            sent = os.pwritev(fd, [view[:ALIGNMENT]], ALIGNMENT)
            got = os.preadv(fd, [view[ALIGNMENT:]], ALIGNMENT)
        return sent == got == ALIGNMENT and pages[ALIGNMENT:] == pattern


def _alignment_refusal(fd: int) -> str:
    """Return why 4 KiB alignment is not enough, as far as the kernel says."""
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return ""
    if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return ""
    mask = int.from_bytes(buffer.raw[0:4], "little")
    memory = int.from_bytes(buffer.raw[0x98:0x9C], "little")
    offset = int.from_bytes(buffer.raw[0x9C:0xA0], "little")
    if mask & _STATX_DIOALIGN and max(memory, offset) > ALIGNMENT:
        return f"needs {max(memory, offset)} B alignment"
    return ""


def open_unnamed(folder: Path, flags: int = 0) -> int:
    """Return a descriptor of a new file in ``folder`` that has no name and dies with it."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    path = folder / f"unnamed-{secrets.token_hex(8)}"
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    return fd
