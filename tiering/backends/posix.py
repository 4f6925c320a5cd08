"""Files read and written with preadv and pwritev by a few threads: the engine that always works."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tiering import fsops
from tiering.backends.open_files import OpenFiles
from tiering.errors import StorageError
from tiering.records import ALIGNMENT

PIECE_NBYTES = 1 << 20  # many small pieces keep a drive busier than few large ones
THREADS_PER_DRIVE = 32
OPEN_FILES = 512

File = Path | int  # a path, or a descriptor that the caller keeps open
_Move = Callable[[int, Sequence[memoryview], int], int]


def address_of(view: memoryview) -> int:
    """Return where the bytes of ``view`` begin."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


class PosixBackend:
    """Moves bytes between buffers and the files of one drive. Thread-safe.

    ``threads`` threads work on the pieces of all requests; each request moves completely or its
    error reaches the future. A direct backend takes only offsets, lengths and addresses that are
    multiples of ``alignment``; a buffered one takes any.
    """

    def __init__(
        self,
        name: str,
        *,
        direct: bool,
        writable: bool,
        alignment: int = ALIGNMENT,
        threads: int = THREADS_PER_DRIVE,
        open_files: int = OPEN_FILES,
    ) -> None:
        self.direct = direct
        self._alignment = alignment if direct else 1
        flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
        flags |= os.O_DIRECT if direct else 0
        self._files = OpenFiles(lambda path: os.open(path, flags), os.close, open_files)
        self._workers = _Workers(threads, f"posix-{name}")

    @property
    def alignment(self) -> int:
        """What offsets, lengths and addresses of a transfer are multiples of."""
        return self._alignment

    def read(self, path: File, offset: int, out: memoryview) -> Future[int]:
        """Fill ``out`` with the bytes at ``offset``; it is borrowed until the future ends.

        Raises:
            StorageError: In the future: the file is missing, ends early or cannot be read.
        """
        return self._submit("read", os.preadv, path, offset, out)

    def write(self, path: File, offset: int, data: memoryview) -> Future[int]:
        """Write ``data`` at ``offset`` of an existing file; it is borrowed until the future ends.

        Durable after a sync of the drive.
        """
        return self._submit("write", os.pwritev, path, offset, data)

    def forget(self, path: Path) -> None:
        """Close a file that is about to be removed or replaced."""
        self._files.forget(path)

    def close(self) -> None:
        """Wait for what is in flight and close every file; later transfers raise."""
        self._workers.close()
        self._files.close()

    def _submit(
        self, action: str, move: _Move, path: File, offset: int, view: memoryview
    ) -> Future[int]:
        view = view.cast("B")
        require_aligned(path, offset, view, self.alignment)
        if self._workers.closed:
            raise _closed(action, path)
        ended = fsops.begin_write(path, offset, view) if action == "write" else None
        request = _Request(action, move, path, offset, view, self._alignment, self._files, ended)
        if not self._workers.put(request.work, max(1, -(-len(view) // PIECE_NBYTES))):
            raise _closed(action, path)
        return request.future


def _closed(action: str, file: File) -> ValueError:
    return ValueError(f"cannot {action} {_path_of(file)}: the drive was closed")


class _Workers:
    """Threads that are started as they are needed and do what is put before them, in order."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._asked = 0  # works that have not ended
        self._guard = threading.Lock()
        self.closed = False

    def put(self, work: Callable[[], None], times: int) -> bool:
        """Have up to ``times`` threads do ``work``, which raises nothing; False once closed.

        Raises:
            RuntimeError: There is no thread, and none can be started.
        """
        times = min(times, self._most)
        with self._guard:
            if self.closed:
                return False
            self._start(min(self._most, self._asked + times))
            self._asked += times
            for _ in range(times):
                self._work.put(work)
        return True

    def _start(self, count: int) -> None:
        """Start threads until there are ``count``; fewer will do where there can be no more."""
        for number in range(len(self._threads), count):
            name = f"{self._name}_{number}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._guard:
                self._asked -= 1

    def close(self) -> None:
        """Return when all that was put is done and the threads have ended."""
        with self._guard:
            self.closed = True
            for _ in self._threads:
                self._work.put(None)
        for thread in self._threads:
            thread.join()


class _Request:
    """One transfer. Threads take one piece of it after another; who ends the last ends it all."""

    def __init__(
        self,
        action: str,
        move: _Move,
        file: File,
        offset: int,
        view: memoryview,
        alignment: int,
        files: OpenFiles[int],
        ended: fsops.Ended | None,
    ) -> None:
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()
        self._action, self._move, self._file, self._files = action, move, file, files
        self._offset, self._view, self._nbytes = offset, view, len(view)
        self._alignment = alignment
        self._ended = ended
        self._guard = threading.Lock()
        self._next = 0
        self._moving = 0
        self._errors: dict[int, BaseException] = {}

    def work(self) -> None:
        """Move pieces until none is left to take."""
        with ExitStack() as stack:
            fd: int | None = None
            while (at := self._take()) is not None:
                error: BaseException | None = None
                try:
                    fd = self._open(at, stack) if fd is None else fd
                    self._move_piece(fd, at)
                except BaseException as caught:  # noqa: BLE001  a thread's edge: told to the waiter
                    error = caught
                self._end(at, error)

    def _take(self) -> int | None:
        """Return where the next piece begins; after an error nothing more is begun."""
        with self._guard:
            if self._errors or self._next >= max(1, self._nbytes):
                return None
            at, self._next = self._next, self._next + PIECE_NBYTES
            self._moving += 1
            return at

    def _open(self, at: int, stack: ExitStack) -> int:
        if isinstance(self._file, int):
            return self._file
        try:
            return stack.enter_context(self._files.lease(self._file))
        except OSError as error:
            raise self._failed("open", error.errno or 0, at) from error

    def _move_piece(self, fd: int, at: int) -> None:
        view = self._view[at : at + PIECE_NBYTES]
        done = 0
        while done < len(view):
            begin = self._offset + at + done
            moved, code = _move_once(self._move, fd, view[done:], begin, self._alignment)
            done += moved
            if moved == 0:
                raise self._failed(self._action, code, at + done)

    def _end(self, at: int, error: BaseException | None) -> None:
        with self._guard:
            self._moving -= 1
            if error is not None:
                self._errors[at] = error
            if self._moving or (self._next < self._nbytes and not self._errors):
                return
        self._finish()

    def _finish(self) -> None:
        del self._view  # nothing is borrowed any more once the future has ended
        try:
            if self._errors:
                raise self._errors[min(self._errors)]
            if self._ended is not None:
                self._ended()  # here, so that whoever waits for the future comes after it
        except BaseException as error:  # noqa: BLE001  a thread's edge: told to the waiter
            self.future.set_exception(error)
        else:
            self.future.set_result(self._nbytes)

    def _failed(self, action: str, code: int, moved: int) -> StorageError:
        """Return the error of a transfer of which ``moved`` bytes came before it."""
        return StorageError(
            action,
            _path_of(self._file),
            errno=code,
            offset=self._offset + moved,
            wanted=self._nbytes,
            moved=moved,
        )


def _move_once(
    move: _Move, fd: int, view: memoryview, offset: int, alignment: int
) -> tuple[int, int]:
    """Return how many bytes were moved, and why none: an errno, or 0 where the file ends.

    A partial block counts as not moved, so that the next request begins aligned again.
    """
    try:
        moved = move(fd, [view], offset)
    except OSError as error:
        return 0, error.errno or 0
    return (moved if moved == len(view) else moved - moved % alignment), 0


def _path_of(file: File) -> Path:
    """Return where a file is; one without a name is called by the folder that it is in."""
    if isinstance(file, Path):
        return file
    link = Path(f"/proc/self/fd/{file}")
    try:
        return Path(os.readlink(link))
    except OSError:
        return link


def require_aligned(path: File, offset: int, view: memoryview, alignment: int) -> None:
    """Return if a transfer may go as it is.

    Raises:
        ValueError: Offset, length or address is no multiple of ``alignment``.
    """
    address = address_of(view) if alignment > 1 else 0
    if offset % alignment or len(view) % alignment or address % alignment:
        raise ValueError(
            f"direct I/O on {_path_of(path)}: offset {offset}, length {len(view)} and address "
            f"{address:#x} must be multiples of {alignment}"
        )


def joined(pieces: Sequence[Future[int]], offset: int, wanted: int) -> Future[int]:
    """Return a future that ends when all ``pieces`` have, with the first error if there is one.

    Pieces move side by side: what counts as moved is what lies before the first failure.
    """
    whole: Future[int] = Future()
    whole.set_running_or_notify_cancel()
    left = len(pieces)
    guard = threading.Lock()

    def finish(_: Future[int]) -> None:
        nonlocal left
        with guard:
            left -= 1
            if left:
                return
        try:
            for piece in pieces:
                piece.result()
            whole.set_result(wanted)
        except StorageError as error:
            whole.set_exception(_of_whole(error, offset, wanted))
        except BaseException as error:  # noqa: BLE001  a thread's edge: handed to the waiter
            whole.set_exception(error)

    for piece in pieces:
        piece.add_done_callback(finish)
    if not pieces:
        whole.set_result(0)
    return whole


def _of_whole(error: StorageError, offset: int, wanted: int) -> StorageError:
    """Return the error of a piece as that of the request it was cut from."""
    first = max(error.offset, offset)  # an error before the first byte may have no offset
    whole = StorageError(
        error.action,
        error.path,
        errno=error.errno,
        offset=first,
        wanted=wanted,
        moved=first - offset,
        hint=error.hint,
    )
    whole.__cause__ = error
    return whole
