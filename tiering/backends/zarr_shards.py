"""Shard files open for reading: the index checked once, every chunk at every read."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tiering.checksum import crc32c
from tiering.codecs import CRC_NBYTES, Codec, Place, ShardSpec, decode_index
from tiering.errors import CorruptionError, StorageError


class Scratch(threading.local):
    """A buffer for an encoded chunk in every thread."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def borrow(self, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` of this thread's buffer."""
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]


class OpenShard:
    """One version of a shard file, opened when it is first read. Thread-safe; ``close`` is last.

    Offsets in its errors are those of the file.
    """

    def __init__(
        self, path: Path, spec: ShardSpec, scratch: Scratch, drive: int | None = None
    ) -> None:
        self._path = path
        self._spec = spec
        self._drive = drive
        on = "" if drive is None else f"drive {drive}: "
        self._where = f"{on}{spec.name} ({path})"
        self._scratch = scratch
        self._guard = threading.Lock()
        self._fd = -1
        self._places: list[Place | None] = []

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)

    def read_chunk(self, chunk: int, out: memoryview) -> None:
        """Fill ``out`` with the decoded ``chunk``; after an error its content is undefined.

        Raises:
            CorruptionError: The file is too short, its index is damaged or leads elsewhere, the
                chunk's crc32c differs, or it cannot be decoded to its length.
            StorageError: The file is missing, cannot be read, or ended early.
        """
        self._open()
        place = self._places[chunk]
        if place is None:
            np.frombuffer(out, np.uint8).fill(0)
        elif self._spec.codec is Codec.NONE:
            self._read_plain(chunk, *place, out)
        else:
            self._read_encoded(chunk, *place, out)

    def place(self, chunk: int) -> Place | None:
        """Return where the encoded ``chunk`` lies in the file; None if it is absent.

        Raises:
            CorruptionError: The index is damaged.
            StorageError: The file is missing or cannot be read.
        """
        self._open()
        return self._places[chunk]

    def _open(self) -> None:
        """Open the file and read its index, once."""
        with self._guard:
            if self._places:
                return
            if self._fd < 0:
                with self._reading("open", 0):
                    self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            self._places = self._read_index()

    def _read_plain(self, chunk: int, offset: int, nbytes: int, out: memoryview) -> None:
        if nbytes != len(out) + CRC_NBYTES:
            wanted = len(out) + CRC_NBYTES
            raise self._damaged(chunk, offset, nbytes, f"{nbytes} B instead of {wanted}")
        crc = memoryview(bytearray(CRC_NBYTES))
        self._fill([out, crc], offset)
        self._check_crc(chunk, offset, out, crc)

    def _read_encoded(self, chunk: int, offset: int, nbytes: int, out: memoryview) -> None:
        encoded = self._scratch.borrow(self._spec.max_encoded_nbytes)[:nbytes]
        self._fill([encoded], offset)
        data, crc = encoded[:-CRC_NBYTES], encoded[-CRC_NBYTES:]
        self._check_crc(chunk, offset, data, crc)
        try:
            self._spec.codec.decompress(data, out)
        except ValueError as error:
            what = f"{self._spec.codec}: {error}"
            raise self._damaged(chunk, offset, nbytes, what) from error

    def _check_crc(self, chunk: int, offset: int, data: memoryview, crc: memoryview) -> None:
        (expected,) = struct.unpack("<I", crc)
        found = crc32c(data)
        if found != expected:
            sums = f"crc32c is {found:08x}, the file says {expected:08x}"
            raise self._damaged(chunk, offset, len(data) + len(crc), sums)

    def _damaged(self, chunk: int, offset: int, nbytes: int, what: str) -> CorruptionError:
        what = f"chunk {chunk} at offset {offset} is damaged: {what}"
        return self._corruption(f"{self._where}: {what}", offset, nbytes)

    def _corruption(self, what: str, offset: int | None, nbytes: int | None) -> CorruptionError:
        return CorruptionError(
            what,
            file=self._path,
            drive=self._drive,
            offset=offset,
            nbytes=nbytes,
            record=self._spec.array,
        )

    def _read_index(self) -> list[Place | None]:
        with self._reading("read", 0):
            nbytes = os.fstat(self._fd).st_size
        start = nbytes - self._spec.index_nbytes
        if start < 0:
            wanted = f"its index alone has {self._spec.index_nbytes} B"
            what = f"{self._where} is truncated: {nbytes} B, {wanted}"
            raise self._corruption(what, None, None)
        data = bytearray(self._spec.index_nbytes)
        self._fill([memoryview(data)], start)
        try:
            return decode_index(self._spec, data, start)
        except CorruptionError as error:
            what = f"{self._where}: index at offset {start} is damaged: {error}"
            raise self._corruption(what, start, len(data)) from error

    def _fill(self, views: list[memoryview], offset: int) -> None:
        """Read exactly ``views`` from ``offset``."""
        wanted, moved = sum(map(len, views)), 0
        while moved < wanted:
            with self._reading("read", offset, wanted, moved):
                count = os.preadv(self._fd, _behind(views, moved), offset + moved)
            if count == 0:
                raise self._failed("read", 0, offset, wanted, moved)
            moved += count

    @contextmanager
    def _reading(self, action: str, offset: int, wanted: int = 0, moved: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(action, error.errno or 0, offset, wanted, moved) from error

    def _failed(
        self, action: str, errno: int, offset: int, wanted: int, moved: int
    ) -> StorageError:
        at = offset + moved
        return StorageError(action, self._path, errno=errno, offset=at, wanted=wanted, moved=moved)


def _behind(views: list[memoryview], moved: int) -> list[memoryview]:
    """Return what is left of ``views`` after their first ``moved`` bytes."""
    left = []
    for view in views:
        skipped = min(moved, len(view))
        moved -= skipped
        if skipped < len(view):
            left.append(view[skipped:])
    return left


@dataclass(slots=True, eq=False)
class _Decoded:
    guard: threading.Lock = field(default_factory=threading.Lock)
    shard: OpenShard | None = None
    chunk: int = 0
    data: bytearray = field(default_factory=bytearray)
    filled: bool = False
    users: int = 0


class DecodedChunks:
    """The chunks that were decoded last, for reads of parts of them. Thread-safe.

    There are at most as many as ``capacity`` or as are in use at once, whichever is more.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._guard = threading.Lock()
        self._entries: list[_Decoded] = []  # the longest unused first

    @contextmanager
    def lease(self, shard: OpenShard, chunk: int, nbytes: int) -> Iterator[memoryview]:
        """Lend the decoded ``chunk`` of ``shard``, which has ``nbytes``."""
        entry = self._acquire(shard, chunk)
        try:
            with entry.guard:  # whoever wants the same chunk waits instead of decoding it again
                if not entry.filled:
                    if len(entry.data) != nbytes:
                        entry.data = bytearray(nbytes)
                    shard.read_chunk(chunk, memoryview(entry.data))
                    entry.filled = True
            yield memoryview(entry.data).toreadonly()
        finally:
            with self._guard:
                entry.users -= 1

    def _acquire(self, shard: OpenShard, chunk: int) -> _Decoded:
        with self._guard:
            entry = self._find(shard, chunk) or self._make_room()
            if entry.shard is not shard or entry.chunk != chunk:
                entry.shard, entry.chunk, entry.filled = shard, chunk, False
            self._entries = [other for other in self._entries if other is not entry] + [entry]
            entry.users += 1
            return entry

    def _find(self, shard: OpenShard, chunk: int) -> _Decoded | None:
        return next((e for e in self._entries if e.shard is shard and e.chunk == chunk), None)

    def _make_room(self) -> _Decoded:
        idle = next((e for e in self._entries if not e.users), None)
        return idle if idle and len(self._entries) >= self._capacity else _Decoded()

    def clear(self) -> None:
        """Give the memory back."""
        with self._guard:
            self._entries.clear()
