"""Which way to a drive works: direct I/O, or through the page cache. Found out, never assumed."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiering import fsops
from tiering.records import ALIGNMENT

_log = logging.getLogger(__name__)

IN_RAM = frozenset({"tmpfs", "ramfs"})

_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a drive is read and written, and why.

    Attributes:
        direct: Whether transfers pass the page cache by.
        alignment: What offsets, lengths and addresses of a transfer are multiples of.
        filesystem: Its type, as the kernel names it.
        reason: Why not directly, or that it was tried.
    """

    direct: bool
    alignment: int = ALIGNMENT
    filesystem: str
    reason: str

    @property
    def in_ram(self) -> bool:
        """Whether what lies on the drive takes this machine's memory."""
        return self.filesystem in IN_RAM


def probe(folder: Path, *, sample: Path | None = None) -> Access:
    """Return how ``folder`` is best read and written.

    A scratch file is written directly and read back; a reader that may not write passes a
    ``sample`` file of the folder, which is only read. A writer's drive that cannot be used
    directly is worth a warning: everything that a run writes goes through it.
    """
    filesystem = fsops.filesystem_type(folder)
    alignment, reason = _tried(folder, sample, filesystem)
    if reason:
        _say(logging.WARNING if sample is None else logging.INFO, folder, filesystem, reason)
        return Access(direct=False, alignment=1, filesystem=filesystem, reason=reason)
    _log.info("%s (%s): direct I/O in multiples of %d B", folder, filesystem, alignment)
    return Access(
        direct=True, alignment=alignment, filesystem=filesystem, reason="tried, and it works"
    )


@functools.lru_cache
def _say(level: int, folder: Path, filesystem: str, reason: str) -> None:
    """Log how a drive is used, once: a run opens its store more than once."""
    _log.log(level, "%s (%s): buffered, not direct I/O: %s", folder, filesystem, reason)


def _tried(folder: Path, sample: Path | None, filesystem: str) -> tuple[int, str]:
    """Return the alignment that works, or why none does."""
    if filesystem in IN_RAM:
        return 1, f"a {filesystem} is RAM, and counts as RAM"
    try:
        with _trial_file(folder, sample) as fd:
            alignment = reported_alignment(fd) or ALIGNMENT
            return alignment, _refusal(fd, alignment, write=sample is None)
    except OSError as error:
        return 1, f"the trial failed: {error.strerror}"


@contextmanager
def _trial_file(folder: Path, sample: Path | None) -> Iterator[int]:
    if sample is None:
        fd = open_unnamed(folder, os.O_DIRECT)
    else:
        fd = os.open(sample, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _refusal(fd: int, alignment: int, *, write: bool) -> str:
    if ALIGNMENT % alignment:
        return f"it needs {alignment} B alignment, shards have {ALIGNMENT}"
    if write:
        return "" if _reads_back(fd, alignment) else "what was written does not read back"
    with mmap.mmap(-1, ALIGNMENT) as page:
        os.preadv(fd, [page], 0)
    return ""


def _reads_back(fd: int, alignment: int) -> bool:
    """Write and read one block, at an offset and an address that are no more aligned than it."""
    pattern = secrets.token_bytes(alignment)
    with mmap.mmap(-1, 4 * ALIGNMENT) as pages, memoryview(pages) as view:
        blocks = [view[k * alignment : (k + 1) * alignment] for k in (1, 3)]
        try:
            blocks[0][:] = pattern
            sent = os.pwritev(fd, blocks[:1], alignment)
            got = os.preadv(fd, blocks[1:], alignment)
            return sent == got == alignment and blocks[1] == pattern
        finally:
            for block in blocks:
                block.release()


def reported_alignment(fd: int) -> int | None:
    """Return the larger of the alignments that the kernel asks for; None if it does not say.

    Raises:
        OSError: It says that the file cannot be read and written directly.
    """
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return None
    if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None
    mask, memory, offset = (
        int.from_bytes(buffer.raw[at : at + 4], "little") for at in (0, 0x98, 0x9C)
    )
    if not mask & _STATX_DIOALIGN:
        return None
    if not (memory and offset):
        raise OSError(errno.EOPNOTSUPP, "statx: not for this file")
    return max(memory, offset)


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
