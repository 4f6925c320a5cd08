"""Who may write a store, and which generations are being read. Both are kernel locks (flock),
which die with their process: a file that is left behind locks nothing."""

from __future__ import annotations

import datetime
import errno
import fcntl
import os
import socket
import stat
import sys
import time
from pathlib import Path

from tiering import fsops
from tiering.errors import CorruptionError, LockedError, MegatrainError, StorageError
from tiering.small_files import LABEL_MOST, kind_of, read_small

_TRIES = 5
_PAUSE_S = 0.01
_HOLD_TRIES = 500
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO in the file's place must not keep us
_TEXT_MOST = 500


class StoreLock:
    """The exclusive right to write a store, held from creation until ``close``.

    The text in the file is for messages only.

    Raises:
        LockedError: Another process holds it; the message names the holder.
    """

    def __init__(self, path: Path, run_id: str = "") -> None:
        self.path = path
        self._fd = _open_lock(path)
        try:
            # More than once: ``lock_holder`` takes a shared lock for a moment to see who is there.
            if not _acquire(self._fd, path, fcntl.LOCK_EX, _TRIES):
                raise LockedError(f"store {path.parent} is in use by {holder_text(path)}")
            fsops.rewrite_in_place(self._fd, path, _holder(run_id).encode())
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Let go of the store."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_lock(path: Path) -> int:
    """Return a descriptor of the lock file, which is made if need be.

    Its text is written over: where it is a link, that would be somebody's file.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except OSError as error:
        raise StorageError("look at", path, errno=error.errno or 0) from error
    if not stat.S_ISREG(mode):
        raise CorruptionError(f"{path}: is {kind_of(mode)}, expected a file", file=path)
    return fsops.open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)


def _acquire(fd: int, path: Path, kind: int, tries: int) -> bool:
    for _ in range(tries):
        if _flock(fd, kind, path):
            return True
        time.sleep(_PAUSE_S)
    return False


def _holder(run_id: str) -> str:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run = f" run {run_id}" if run_id else ""
    program = Path(sys.argv[0]).name or "python"
    return f"pid {os.getpid()} on {socket.gethostname()} since {started} ({program}{run})\n"


def holder_text(path: Path) -> str:
    """Return what the last holder of a lock file wrote into it."""
    try:
        text = read_small(path, LABEL_MOST).decode(errors="replace").strip()
        return text[:_TEXT_MOST] or "an unnamed process"
    except (OSError, MegatrainError):
        return "an unknown process"


def lock_holder(path: Path) -> str | None:
    """Return who holds the lock file ``path`` now, or None."""
    try:
        fd = os.open(path, _READ)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return None if _flock(fd, fcntl.LOCK_SH, path) else holder_text(path)
    finally:
        os.close(fd)


def hold(path: Path) -> int | None:
    """Return a descriptor that keeps ``path`` from being removed, or None if it is gone.

    Closing the descriptor ends the hold; so does the end of the process.

    Raises:
        LockedError: A writer has kept it to itself for longer than removing the file takes.
        StorageError: It cannot be read.
    """
    try:
        fd = os.open(path, _READ)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError("open", path, errno=error.errno or 0) from error
    try:
        if _acquire(fd, path, fcntl.LOCK_SH, _HOLD_TRIES):
            return fd
        pids = ", ".join(map(str, holders_of(path))) or "unknown"
        raise LockedError(
            f"{path} is locked by pid {pids}: the shards of the store are being moved; "
            "it can be read again when that has ended"
        )
    except BaseException:
        os.close(fd)
        raise


def claim(path: Path) -> int | None:
    """Return a descriptor that owns ``path`` alone, or None while somebody holds it."""
    fd = fsops.open_file(path, _READ)
    if _flock(fd, fcntl.LOCK_EX, path):
        return fd
    os.close(fd)
    return None


def is_held(path: Path) -> bool:
    """Return whether somebody holds ``path``; nobody can if it is gone."""
    try:
        fd = os.open(path, _READ)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not _flock(fd, fcntl.LOCK_EX, path)
    finally:
        os.close(fd)


def _flock(fd: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise StorageError("lock", path, errno=error.errno or 0) from error
    return True


def holders_of(path: Path) -> list[int]:
    """Return the process ids that hold a lock on ``path``, as far as the kernel tells."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    held = [fields for line in lines if (fields := line.split())[1:2] == ["FLOCK"]]
    inode = [fields for fields in held if fields[5].rpartition(":")[2] == str(status.st_ino)]
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    # some file systems show programs another device than the kernel's: then the inode must do
    here = [fields for fields in inode if fields[5].rpartition(":")[0] == device] or inode
    return sorted({int(fields[4]) for fields in here})
