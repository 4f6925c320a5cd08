"""Zarr v3 shards whose chunks are encoded: any range is read, whole files are replaced."""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from tiering import fsops
from tiering.backends.open_files import OpenFiles
from tiering.backends.posix import OPEN_FILES, joined
from tiering.backends.zarr_shards import DecodedChunks, OpenShard, Scratch
from tiering.checksum import crc32c
from tiering.codecs import Place, ShardSpec, encode_index
from tiering.errors import StorageError

THREADS = 2
_BLOCK_NBYTES = 64 << 10
_log = logging.getLogger(__name__)


class ShardWriter:
    """A shard on its way from its first byte to its last, then in the place of ``path``.

    At most one decoded chunk is kept. Not thread-safe.

    Raises:
        StorageError: The file does not exist, or its replacement cannot be written.
    """

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        try:
            os.stat(path)
        except OSError as error:
            raise StorageError("replace", path, errno=error.errno or 0) from error
        self._spec = spec
        self._file = fsops.Replacement(path)
        self._buffer = memoryview(b"")
        self._filled = 0
        self._places: list[Place | None] = []
        self._end = 0

    @property
    def finished(self) -> bool:
        """Whether the shard is complete and has taken its place."""
        return len(self._places) == self._spec.chunks

    def feed(self, data: memoryview) -> int:
        """Take the bytes that follow, at most to the end of a chunk; return how many."""
        chunk_nbytes = self._spec.chunk_nbytes
        piece = data[: chunk_nbytes - self._filled]
        if len(piece) == chunk_nbytes:
            self._put(piece)
            return chunk_nbytes
        if not self._buffer:
            self._buffer = memoryview(bytearray(chunk_nbytes))
        self._buffer[self._filled : self._filled + len(piece)] = piece
        self._filled += len(piece)
        if self._filled == chunk_nbytes:
            self._filled = 0
            self._put(self._buffer)
        return len(piece)

    def _put(self, chunk: memoryview) -> None:
        place = None if _is_zero(chunk) else self._append(chunk)
        if len(self._places) + 1 == self._spec.chunks:
            self._file.append(encode_index(self._spec, [*self._places, place]))
            self._file.finish()
        self._places.append(place)

    def _append(self, chunk: memoryview) -> Place:
        encoded = self._spec.codec.compress(chunk, self._spec.itemsize)
        crc = struct.pack("<I", crc32c(encoded))
        self._file.append(encoded, crc)
        place = (self._end, len(encoded) + len(crc))
        self._end += place[1]
        return place

    def discard(self) -> None:
        """Remove what was written so far; the file at ``path`` stays as it was."""
        self._file.discard()


def _is_zero(view: memoryview) -> bool:
    """Return whether all bytes are zero; what is not shows that in its first block."""
    data = np.frombuffer(view, np.uint8)
    return not any(data[at : at + _BLOCK_NBYTES].any() for at in range(0, len(data), _BLOCK_NBYTES))


@dataclass(slots=True)
class _Task:
    run: Callable[[], int]
    future: Future[int]
    context: Context  # of whoever asked, so that its observer sees what a thread does for it


@dataclass(slots=True)
class _File:
    """What a file is, and the one write of it that is under way: its tasks run in order."""

    spec: ShardSpec
    position: int = 0  # where the next write begins, unless it begins anew at 0
    pending: deque[_Task] = field(default_factory=deque)
    running: bool = False
    writer: ShardWriter | None = None
    failed: int | None = None  # errno of the write under way: what continues it fails like it

    def discard(self) -> int:
        writer, self.writer = self.writer, None
        if writer is not None:
            try:
                writer.discard()
            except StorageError as error:  # the next write of this file removes it
                _log.warning("an unfinished shard stays behind: %s", error)
        return 0


class Zarr3Backend:
    """Moves decoded bytes between buffers and encoded shards. Thread-safe.

    What a file is must be told with ``describe`` first. Any range can be read. A file is written
    from its first byte to its last, in order, in pieces of any size, and takes the place of the
    old one in one step when the last byte has come; a write at offset 0 begins anew. Until then
    reads see the old file. Errors name ``drive``.

    Memory: one decoded chunk for each file being written, and for each of ``threads`` threads one
    encoded chunk and one decoded chunk of which only a part was read.
    """

    def __init__(
        self,
        name: str,
        *,
        writable: bool,
        drive: int | None = None,
        threads: int = THREADS,
        open_files: int = OPEN_FILES,
    ) -> None:
        self._name = name
        self._drive = drive
        self._writable = writable
        self._guard = threading.Lock()
        self._files: dict[Path, _File] = {}
        self._closed = False
        self._scratch = Scratch()
        self._open = OpenFiles(self._open_shard, OpenShard.close, open_files)
        self._decoded = DecodedChunks(threads)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"zarr-{name}")

    @property
    def alignment(self) -> int:
        """What offsets, lengths and addresses of a transfer are multiples of: anything."""
        return 1

    def describe(self, path: Path, spec: ShardSpec) -> None:
        """Tell what the file at ``path`` holds, whether or not it exists yet."""
        with self._guard:
            known = self._files.get(path)
            if known is None or known.spec != spec:
                if known is not None and (known.running or known.writer):
                    raise ValueError(f"{path} is being written and cannot become {spec.name}")
                self._files[path] = _File(spec)
                self._open.forget(path)

    def nbytes(self, path: Path) -> int:
        """Return how many decoded bytes the file at ``path`` has."""
        with self._guard:
            return self._described("measure", path).spec.nbytes

    def read(self, path: Path, offset: int, out: memoryview) -> Future[int]:
        """Fill ``out`` with the decoded bytes at ``offset``; it is borrowed until the future ends.

        Raises:
            CorruptionError: In the future: the file is short, or a part that was needed of it is
                damaged; ``out`` is undefined.
            StorageError: In the future: the file is missing or cannot be read, or ``out`` reaches
                beyond its end.
        """
        view = memoryview(out).cast("B")
        if offset < 0 or view.readonly:
            raise ValueError(f"cannot read {path} at offset {offset} into {view}")
        with self._guard:
            spec = self._described("read", path).spec
            pieces = self._submit_pieces(path, spec, offset, view)
        return joined(pieces, offset, len(view))

    def _open_shard(self, path: Path) -> OpenShard:
        return OpenShard(path, self._files[path].spec, self._scratch, self._drive)

    def place(self, path: Path, chunk: int) -> Place | None:
        """Return offset and length of an encoded chunk in its file; None if it is absent.

        Raises:
            CorruptionError: The file's index is damaged.
            StorageError: The file is missing or cannot be read.
        """
        with self._guard:
            self._described("look into", path)
        with self._open.lease(path) as shard:
            return shard.place(chunk)

    def _submit_pieces(
        self, path: Path, spec: ShardSpec, offset: int, view: memoryview
    ) -> list[Future[int]]:
        pieces = []
        while view and offset < spec.nbytes:
            chunk, start = divmod(offset, spec.chunk_nbytes)
            piece = view[: spec.chunk_nbytes - start]
            pieces.append(self._threads.submit(self._read_piece, path, spec, chunk, start, piece))
            view, offset = view[len(piece) :], offset + len(piece)
        if view:
            error = StorageError("read", path, offset=offset, wanted=len(view), hint=spec.name)
            pieces.append(_failed(error))
        return pieces

    def _read_piece(
        self, path: Path, spec: ShardSpec, chunk: int, start: int, out: memoryview
    ) -> int:
        try:
            with self._open.lease(path) as shard:
                if len(out) == spec.chunk_nbytes:
                    shard.read_chunk(chunk, out)
                else:
                    with self._decoded.lease(shard, chunk, spec.chunk_nbytes) as data:
                        out[:] = data[start : start + len(out)]
        except StorageError as error:
            at = chunk * spec.chunk_nbytes + start
            hint = f"{spec.name}, chunk {chunk}, offset {error.offset} of the file"
            raise _of_piece(error, path, at, len(out), 0, hint) from error
        return len(out)

    def write(self, path: Path, offset: int, data: memoryview) -> Future[int]:
        """Write ``data`` behind what was written last; it is borrowed until the future ends.

        The file is replaced when the future of its last byte ends, and durable after a sync of
        the drive.

        Raises:
            ValueError: ``offset`` is neither 0 nor where the last write ended, or ``data`` reaches
                beyond the file's end.
            StorageError: In the future: the file is missing or cannot be written. The old file
                stays; writes that continue this one fail like it.
        """
        view = memoryview(data).cast("B")
        with self._guard:
            file = self._described("write", path)
            if not self._writable:
                hint = f"{self._name} was opened for reading"
                return _failed(StorageError("write", path, errno=errno.EBADF, hint=hint))
            if not view:
                return joined([], offset, 0)
            self._continue(path, file, offset, len(view))
            return self._enqueue(file, partial(self._write_piece, path, file, offset, view))

    @staticmethod
    def _continue(path: Path, file: _File, offset: int, nbytes: int) -> None:
        end = offset + nbytes
        if offset not in (0, file.position) or end > file.spec.nbytes:
            raise ValueError(
                f"cannot write {path}: {nbytes} B at offset {offset} of {file.spec.nbytes} B; "
                f"a shard is written in order, and the last write ended at {file.position}"
            )
        file.position = end % file.spec.nbytes

    def _enqueue(self, file: _File, run: Callable[[], int]) -> Future[int]:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        file.pending.append(_Task(run, future, copy_context()))
        if not file.running:
            try:
                self._threads.submit(self._work_on, file)
            except RuntimeError:  # no thread: nobody would do what was asked, for ever
                file.pending.pop()
                raise
            file.running = True
        return future

    def _work_on(self, file: _File) -> None:
        while True:
            with self._guard:
                if not file.pending:
                    file.running = False
                    return
                task = file.pending.popleft()
            try:
                result = task.context.run(task.run)
            except BaseException as error:  # noqa: BLE001 - it is the waiter's
                task.future.set_exception(error)
            else:
                task.future.set_result(result)

    def _write_piece(self, path: Path, file: _File, offset: int, view: memoryview) -> int:
        done = 0
        if offset == 0:
            file.discard()
            file.failed = None
        try:
            writer = _writer_of(path, file, offset)
            while done < len(view):
                done += writer.feed(view[done:])
        except Exception as error:
            file.discard()
            file.failed = error.errno if isinstance(error, StorageError) else errno.ECANCELED
            if not isinstance(error, StorageError):
                raise
            raise _of_piece(error, path, offset, len(view), done, file.spec.name) from error
        if writer.finished:
            file.writer = None
            self._open.forget(path)
        return done

    def forget(self, path: Path) -> None:
        """Give up a write that is under way and open the file anew when it is next read.

        What the file is stays known.
        """
        given_up = None
        with self._guard:
            file = self._files.get(path)
            if file is not None and not self._closed and (file.running or file.writer):
                file.position = 0
                given_up = self._enqueue(file, file.discard)
        if given_up is not None:
            given_up.result()
        self._open.forget(path)

    def close(self) -> None:
        """Wait for what is in flight, remove what is unfinished and close every file."""
        with self._guard:
            self._closed = True
        self._threads.shutdown(wait=True)
        for file in self._files.values():
            file.discard()
        self._open.close()
        self._decoded.clear()

    def _described(self, action: str, path: Path) -> _File:
        if self._closed:
            raise ValueError(f"cannot {action} {path}: {self._name} is closed")
        file = self._files.get(path)
        if file is None:
            raise ValueError(f"cannot {action} {path}: it was not described to {self._name}")
        return file


def _failed(error: Exception) -> Future[int]:
    future: Future[int] = Future()
    future.set_exception(error)
    return future


def _writer_of(path: Path, file: _File, offset: int) -> ShardWriter:
    """Return the writer that takes the piece at ``offset``: a new one for the first."""
    if file.failed is not None:
        raise StorageError("write after a failed piece of", path, errno=file.failed)
    if file.writer is None:
        if offset:
            raise ValueError(f"{path}: a piece at offset {offset} without those before it")
        file.writer = ShardWriter(path, file.spec)
    return file.writer


def _of_piece(
    error: StorageError, path: Path, offset: int, wanted: int, moved: int, hint: str
) -> StorageError:
    """Return ``error`` as that of the transfer in which it happened, in decoded bytes."""
    return StorageError(
        error.action,
        path,
        errno=error.errno,
        offset=offset + moved,
        wanted=wanted,
        moved=moved,
        hint=hint,
    )
