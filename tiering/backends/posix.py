"""Files read and written with preadv and pwritev by a few threads: the engine that always works."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tiering import fsops
from tiering.backends.open_files import OpenFiles
from tiering.errors import StorageError
from tiering.records import ALIGNMENT

REQUEST_NBYTES = 8 << 20
THREADS_PER_DRIVE = 2
OPEN_FILES = 512

File = Path | int  # a path, or a descriptor that the caller keeps open
_Move = Callable[[int, Sequence[memoryview], int], int]


def address_of(view: memoryview) -> int:
    """Return where the bytes of ``view`` begin."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


class PosixBackend:
    """Moves bytes between buffers and the files of one drive. Thread-safe.

    Requests are cut into pieces of at most 8 MiB that ``threads`` threads work on; every piece
    moves completely or its error reaches the future. A direct backend takes only offsets, lengths
    and addresses that are multiples of ``alignment``; a buffered one takes any.
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
        self._closed = False
        flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
        flags |= os.O_DIRECT if direct else 0
        self._files = OpenFiles(lambda path: os.open(path, flags), os.close, open_files)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"posix-{name}")

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
        self._closed = True
        self._threads.shutdown(wait=True)
        self._files.close()

    def _submit(
        self, action: str, move: _Move, path: File, offset: int, view: memoryview
    ) -> Future[int]:
        if self._closed:
            raise ValueError(f"cannot {action} {_path_of(path)}: the drive was closed")
        view = view.cast("B")
        require_aligned(path, offset, view, self.alignment)
        pieces = [
            self._submit_piece(action, move, path, offset + at, view[at : at + REQUEST_NBYTES])
            for at in range(0, len(view), REQUEST_NBYTES)
        ]
        return pieces[0] if len(pieces) == 1 else joined(pieces, offset, len(view))

    def _submit_piece(
        self, action: str, move: _Move, file: File, offset: int, view: memoryview
    ) -> Future[int]:
        ended = fsops.begin_write(file, offset, view) if action == "write" else None
        return self._threads.submit(self._transfer, action, move, file, offset, view, ended)

    def _transfer(
        self,
        action: str,
        move: _Move,
        file: File,
        offset: int,
        view: memoryview,
        ended: fsops.Ended | None,
    ) -> int:
        wanted = len(view)
        with ExitStack() as stack:
            try:
                fd = file if isinstance(file, int) else stack.enter_context(self._files.lease(file))
            except OSError as error:
                raise _failed("open", file, error.errno or 0, offset, wanted, 0) from error
            done = 0
            while done < wanted:
                moved, code = _move_once(move, fd, view[done:], offset + done, self.alignment)
                done += moved
                if moved == 0:
                    raise _failed(action, file, code, offset + done, wanted, done)
        if ended is not None:
            ended()  # here, so that whoever waits for the future comes after it
        return done


def _failed(
    action: str, file: File, code: int, offset: int, wanted: int, moved: int
) -> StorageError:
    return StorageError(
        action, _path_of(file), errno=code, offset=offset, wanted=wanted, moved=moved
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
