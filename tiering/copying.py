"""Copying a shard file from drive to drive: holes stay holes, and the copy is durable."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from tiering import fsops
from tiering.backends.posix import PosixBackend
from tiering.errors import StorageError
from tiering.records import ALIGNMENT, round_up
from tiering.slots import Shard

_BUFFER_NBYTES = 8 << 20


class Copier:
    """Copies files through two buffers, so that one is read while the other is written."""

    @staticmethod
    def memory_nbytes(largest: int) -> int:
        """Return how much memory it takes to copy files of up to ``largest`` bytes."""
        return 2 * min(_BUFFER_NBYTES, round_up(max(largest, 1), ALIGNMENT))

    def __init__(self, backends: Mapping[int, PosixBackend], memory: memoryview) -> None:
        self._backends = backends
        self._memory = memory
        self._piece = len(memory) // 2
        self._buffers = [memory[: self._piece], memory[self._piece :]]

    def close(self) -> None:
        """Let go of the memory."""
        for view in (*self._buffers, self._memory):
            view.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def copy(
        self,
        source: Shard,
        target: Shard,
        *,
        start: int = 0,
        reserved: int = 0,
        on_bytes: Callable[[int], None],
    ) -> None:
        """Create ``target``: as long as ``source``, and equal to it from the page of ``start`` on.

        What comes before that page is a hole. The first ``reserved`` bytes have their blocks. The
        content is durable when this returns, the name is not.
        """
        size = source.path.stat().st_size
        tail = (size - 1) // ALIGNMENT * ALIGNMENT
        fsops.create_sparse(target.path, size, _read_tail(source.path, tail, size))
        if reserved:
            fsops.reserve(target.path, min(reserved, size))
        # Opened before the bytes are written: only then a sync reports every lost write to us.
        fd = fsops.open_file(target.path, os.O_RDONLY)
        try:
            self._copy_data(source, target, start, tail, on_bytes)
            fsops.fsync_open(fd, target.path)
        finally:
            self._backends[target.drive].forget(target.path)
            os.close(fd)

    def _copy_data(
        self,
        source: Shard,
        target: Shard,
        start: int,
        stop: int,
        on_bytes: Callable[[int], None],
    ) -> None:
        reader, writer = self._backends[source.drive], self._backends[target.drive]
        writing: Future[int] | None = None
        try:
            pieces = data_pieces(source.path, start, stop, self._piece)
            for turn, (offset, nbytes) in enumerate(pieces):
                view = self._buffers[turn % 2][:nbytes]
                reader.read(source.path, offset, view).result()
                if writing:
                    on_bytes(writing.result())
                writing = writer.write(target.path, offset, view)
            if writing:
                on_bytes(writing.result())
        finally:
            if writing:
                writing.exception()  # until then the buffer is in use
            reader.forget(source.path)


def _read_tail(path: Path, start: int, stop: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
    except OSError as error:
        raise StorageError("read", path, errno=error.errno or 0) from error
    if len(data) != stop - start:
        raise StorageError("read", path, offset=start, wanted=stop - start, moved=len(data))
    return data


def data_pieces(path: Path, start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of what is no hole between two offsets, in whole pages.

    No piece is longer than ``limit``.
    """
    fd = fsops.open_file(path, os.O_RDONLY)
    try:
        position = start - start % ALIGNMENT
        while position < stop and (data := _seek(fd, position, os.SEEK_DATA, path)) is not None:
            position = max(position, data - data % ALIGNMENT)
            hole = _seek(fd, data, os.SEEK_HOLE, path)
            end = min(round_up(hole or stop, ALIGNMENT), stop)
            while position < end:
                nbytes = min(end - position, limit)
                yield position, nbytes
                position += nbytes
    finally:
        os.close(fd)


def _seek(fd: int, offset: int, whence: int, path: Path) -> int | None:
    """Return where data or a hole begins, or None if there is no data any more."""
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise StorageError("find the data of", path, errno=error.errno or 0) from error
