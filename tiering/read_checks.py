"""Comparing what is read with the checksums of its chunks: once, or at every read."""

from __future__ import annotations

import mmap
import threading

from tiering.checksum import ChunkCrc, Table, crc32c
from tiering.opened import ChunkRef
from tiering.records import Record, round_up
from tiering.writer import StoreWriter

_PAGE = mmap.PAGESIZE


class FirstPass:
    """The check of a record's committed chunks the first time they are read after opening.

    Pieces of a chunk must come in order from its start; others are passed over.
    """

    def __init__(self, record: Record, store: StoreWriter) -> None:
        self._name = record.name
        self._store = store
        self._crc = ChunkCrc(record)
        self._left = set(range(record.geometry.chunk_count))
        self._guard = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether every chunk was checked."""
        return not self._left

    def check(self, offset: int, data: memoryview) -> None:
        """Take what was read at ``offset``.

        Raises:
            CorruptionError: It completes a chunk whose checksum differs.
        """
        with self._guard:
            for chunk in self._crc.feed(offset, data):
                require(self._name, self._store.chunk(self._name, chunk), self._crc.value(chunk))
                self._left.discard(chunk)


class EveryRead:
    """Reads of one record, each checked against a table of checksums. Thread-safe.

    Owns memory for one chunk once it is needed.
    """

    def __init__(self, record: Record, store: StoreWriter) -> None:
        self._record = record
        self._store = store
        self._crc = ChunkCrc(record)
        self._guard = threading.Lock()
        self._buffer: memoryview | None = None
        self._held: tuple[int, int, Table] | None = None

    def stream(self, slot: int, offset: int, out: memoryview, table: Table) -> None:
        """Fill ``out`` with the next piece of a pass over the record.

        A chunk is compared once its last piece is read. A piece whose chunk did not begin with
        this pass brings the whole chunk in.

        Raises:
            CorruptionError: A chunk's crc32c differs; the content of ``out`` is undefined.
        """
        view = memoryview(out).cast("B")
        with self._guard:
            chunk, start = divmod(offset, self._record.geometry.chunk_nbytes)
            if start and start != self._crc.fed(chunk):
                head = min(len(view), self._record.geometry.chunk_nbytes - start)
                self._copy(slot, chunk, start, view[:head], table)
                view, offset = view[head:], offset + head
            if not view:
                return
            self._store.read(slot, self._record.name, offset, view)
            for done in self._crc.feed(offset, view):
                self._require(slot, done, self._crc.value(done), table)

    def gather(self, slot: int, offset: int, out: memoryview, table: Table) -> None:
        """Fill ``out`` with bytes that belong to no pass, out of whole chunks.

        Raises:
            CorruptionError: A chunk's crc32c differs; the content of ``out`` is undefined.
        """
        view = memoryview(out).cast("B")
        with self._guard:
            while view:
                chunk, start = divmod(offset, self._record.geometry.chunk_nbytes)
                count = min(len(view), self._record.geometry.chunk_nbytes - start)
                self._copy(slot, chunk, start, view[:count], table)
                view, offset = view[count:], offset + count

    def _copy(self, slot: int, chunk: int, start: int, out: memoryview, table: Table) -> None:
        data = self._whole(slot, chunk, table)
        valid = data[start : start + len(out)]
        out[: len(valid)] = valid
        out[len(valid) :] = bytes(len(out) - len(valid))

    def _whole(self, slot: int, chunk: int, table: Table) -> memoryview:
        """Return the valid bytes of a chunk; those of the last one are kept."""
        size = self._record.geometry.chunk_nbytes
        if self._buffer is None:
            self._buffer = memoryview(mmap.mmap(-1, round_up(size, _PAGE)))
        data = self._buffer[: min(size, self._record.nbytes - chunk * size)]
        held = self._held
        if held is None or held[:2] != (slot, chunk) or held[2] is not table:
            self._held = None
            self._store.read(slot, self._record.name, chunk * size, data)
            self._require(slot, chunk, crc32c(data), table)
            self._held = slot, chunk, table
        return data

    def _require(self, slot: int, chunk: int, found: int, table: Table) -> None:
        place = self._store.chunk_in(self._record.name, chunk, slot, table)
        require(self._record.name, place, found)


def require(name: str, place: ChunkRef, found: int) -> None:
    """Refuse a chunk whose crc32c is not the one that it was written with."""
    if found != place.crc:
        raise place.damage(name, found)
