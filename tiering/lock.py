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
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiering import fsops
from tiering.errors import CorruptionError, LockedError, MegatrainError, StorageError
from tiering.small_files import LABEL_MOST, kind_of, read_small

_TRIES = 5
_PAUSE_S = 0.01
_HOLD_TRIES = 500
_OPEN = os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO in the file's place must not keep us
_READ = os.O_RDONLY | _OPEN
_TEXT_MOST = 500
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR})


class StoreLock:
    """The exclusive right to write a store, held from creation until ``close``.

    The text in the file is for messages only.

    Raises:
        LockedError: Another process holds it; the message names the holder.
    """

    def __init__(self, path: Path, run_id: str = "") -> None:
        self.path = path
        self._fds: list[int] = []
        try:
            self._fd = self._acquired()
            self.say(run_id)
        except BaseException:
            self.close()
            raise

    def _acquired(self) -> int:
        while True:
            fd = _open_lock(self.path)
            self._fds.append(fd)
            # More than once: ``lock_holder`` takes a shared lock for a moment to see who is there.
            if not _acquire(fd, self.path, fcntl.LOCK_EX, _TRIES):
                raise LockedError(
                    f"store {self.path.parent} is in use by {named_holder(self.path)}"
                )
            if _is_at(fd, self.path):
                return fd
            # removed by a creation that was given up: who comes next locks another file
            os.close(self._fds.pop())

    def say(self, run_id: str) -> None:
        """Tell whoever is refused which run it is."""
        fsops.rewrite_in_place(self._fd, self.path, _holder(run_id).encode())

    def own(self, path: Path) -> int:
        """Lock a further file, and return a descriptor of it that ``close`` closes.

        Raises:
            LockedError: Somebody else has it locked, under another lock file.
        """
        fd = _open_to_own(path)
        self._fds.append(fd)
        # More than once: the kernel closes the files of a killed process one after another.
        if _acquire(fd, path, fcntl.LOCK_EX, _TRIES):
            return fd
        writers = named_pids(holders_of(path))
        raise LockedError(
            f"store {self.path.parent}: {path.parent} is being written by {writers}, which has "
            f"another lock file than {self.path}: a copy of the store shares its drives, or "
            f"somebody removed {self.path.name}"
        )

    def close(self) -> None:
        """Let go of the store."""
        while self._fds:
            os.close(self._fds.pop())

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


def _is_at(fd: int, path: Path) -> bool:
    """Return whether an open file is the one that ``path`` names now."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError("look at", path, errno=error.errno or 0) from error


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


def named_holder(path: Path) -> str:
    """Return who holds a lock file, by its text if that is the holder's own.

    It is not yet while a holder begins, and no more if a process that it forked outlives it.
    """
    for _ in range(_TRIES):
        text, pids = holder_text(path), holders_of(path)
        if not pids or any(text.startswith(f"pid {pid} ") for pid in pids):
            return text
        time.sleep(_PAUSE_S)
    return f"{text}; held by {named_pids(pids)} here"


def named_pids(pids: Sequence[int]) -> str:
    """Return processes as messages name them."""
    return f"pid {', '.join(map(str, pids))}" if pids else "an unknown process"


def lock_holder(path: Path) -> str | None:
    """Return who holds the lock file ``path`` now, or None."""
    try:
        fd = os.open(path, _READ)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return None if _flock(fd, fcntl.LOCK_SH, path) else named_holder(path)
    finally:
        os.close(fd)


def hold(path: Path) -> int | None:
    """Return a descriptor that keeps ``path`` from being removed, or None if it is gone.

    Closing the descriptor ends the hold; so does the end of the process, and of those that it
    forked: they may go on reading.

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
        if not _acquire(fd, path, fcntl.LOCK_SH, _HOLD_TRIES):
            raise LockedError(
                f"{path} is locked by {named_pids(holders_of(path))}: the shards of the store are "
                "being moved; it can be read again when that has ended"
            )
        if _is_at(fd, path):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def claim(path: Path) -> int | None:
    """Return a descriptor that owns ``path`` alone, or None while somebody holds it."""
    fd = _open_to_own(path)
    if _flock(fd, fcntl.LOCK_EX, path):
        return fd
    os.close(fd)
    return None


def is_held(path: Path) -> bool:
    """Return whether somebody holds ``path``; nobody can if it is gone."""
    if not path.exists():
        return False
    fd = claim(path)
    if fd is not None:
        os.close(fd)
    return fd is None


def _open_to_own(path: Path) -> int:
    """Open a file so that it can be locked exclusively: network file systems want it writable."""
    try:
        return fsops.open_file(path, os.O_RDWR | _OPEN)
    except StorageError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
    return fsops.open_file(path, _READ)


def _flock(fd: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise StorageError("lock", path, errno=error.errno or 0) from error
    return True


def holders_of(path: Path) -> list[int]:
    """Return the process ids that hold a lock on ``path``, as far as the kernel tells.

    The kernel names who took a lock. A process that was forked then keeps it after the other's end.
    """
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
    takers = {int(fields[4]) for fields in here}
    gone = {pid for pid in takers if not _has_locked(pid, status, unseen=True)}
    heirs = {pid for pid in _processes() if _has_locked(pid, status, unseen=False)} if gone else ()
    return sorted(takers - gone | set(heirs) or takers)


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _has_locked(pid: int, status: os.stat_result, *, unseen: bool) -> bool:
    """Return whether a process has a file open that is locked, ``unseen`` if that is hidden."""
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return unseen
    except OSError:
        return False
    return any(_is_locked(pid, number, status) for number in numbers)


def _is_locked(pid: int, number: str, status: os.stat_result) -> bool:
    try:
        if not os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), status):
            return False
        return "FLOCK" in Path(f"/proc/{pid}/fdinfo/{number}").read_text()
    except OSError:  # closed meanwhile
        return False
