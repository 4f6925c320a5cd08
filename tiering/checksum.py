"""crc32c of the chunks of a record."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import crc32c as _crc32c
import numpy as np
from numpy.typing import NDArray

from tiering.records import Record

Buffer = memoryview | bytes | bytearray
Table = NDArray[np.uint32]

_ZEROS = bytes(1 << 16)


def crc32c(data: Buffer, value: int = 0) -> int:
    """Return the crc32c of ``data``, continuing from ``value``."""
    return int(_crc32c.crc32c(data, value))


@functools.lru_cache(maxsize=64)
def zeros_crc(nbytes: int) -> int:
    """Return the crc32c of ``nbytes`` zeros without allocating them."""
    blocks, rest = divmod(nbytes, len(_ZEROS))
    value = 0
    for _ in range(blocks):
        value = crc32c(_ZEROS, value)
    return crc32c(_ZEROS[:rest], value)


def zeros_table(record: Record) -> Table:
    """Return the checksums of a record that was never written."""
    return np.array([zeros_crc(n) for n in _chunk_nbytes(record)], np.uint32)


def _chunk_nbytes(record: Record) -> Iterator[int]:
    geometry = record.geometry
    for chunk in range(geometry.chunk_count):
        yield min(geometry.chunk_nbytes, record.nbytes - chunk * geometry.chunk_nbytes)


class ChunkCrc:
    """The checksum of every chunk of a record, from pieces of any size.

    The pieces of one chunk must come in order from its start; a piece at the start of a chunk
    begins it anew, and a piece that continues nothing is passed over. Chunks may come in any
    order. Only valid bytes count: what is fed past the record's end is ignored. Not thread-safe.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        geometry = record.geometry
        self._chunk_nbytes = geometry.chunk_nbytes
        self._sizes = np.fromiter(_chunk_nbytes(record), np.int64, geometry.chunk_count)
        self._done = np.zeros(geometry.chunk_count, np.int64)
        self._values = np.zeros(geometry.chunk_count, np.uint32)

    def feed(self, offset: int, data: Buffer) -> list[int]:
        """Take the bytes at ``offset`` of the record; return the chunks that they completed."""
        view = memoryview(data).cast("B")[: max(0, self._record.nbytes - offset)]
        completed = []
        while view:
            chunk, start = divmod(offset, self._chunk_nbytes)
            piece = view[: self._chunk_nbytes - start]
            if self._extend(chunk, start, piece):
                completed.append(chunk)
            view, offset = view[len(piece) :], offset + len(piece)
        return completed

    def _extend(self, chunk: int, start: int, piece: memoryview) -> bool:
        if start not in (0, self._done[chunk]):
            return False
        value = int(self._values[chunk]) if start else 0
        self._values[chunk] = crc32c(piece, value)
        self._done[chunk] = start + len(piece)
        return bool(self._done[chunk] == self._sizes[chunk])

    def fed(self, chunk: int) -> int:
        """Return how many bytes of ``chunk`` were fed, from its start."""
        return int(self._done[chunk])

    def value(self, chunk: int) -> int:
        """Return the crc of what was fed of ``chunk``."""
        return int(self._values[chunk])

    @property
    def complete(self) -> bool:
        """Whether every chunk was fed to its end."""
        return bool((self._done == self._sizes).all())

    def table(self) -> Table:
        """Return the crc of every chunk, in order.

        Raises:
            ValueError: A chunk was not fed completely.
        """
        missing = np.flatnonzero(self._done != self._sizes)
        if len(missing):
            chunk = int(missing[0])
            raise ValueError(
                f"{self._record.name}: {len(missing)} of {len(self._done)} chunks are incomplete, "
                f"first chunk {chunk} with {self._done[chunk]} of {self._sizes[chunk]} B"
            )
        return self._values.copy()
