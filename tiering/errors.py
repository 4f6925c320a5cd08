"""Every error a user can cause or a disk can raise, grouped by what the handler does."""

from __future__ import annotations

import errno as errnos
import os
from pathlib import Path
from typing import ClassVar

NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""What the kernel says where a path is wrong, and not the drive."""

FULL = frozenset({errnos.ENOSPC, errnos.EDQUOT, errnos.EFBIG})
"""What the kernel says where there is no room: of the drive, of a quota, of a file's limit."""


class MegatrainError(Exception):
    """Something the user must be told; the command ends with ``exit_code``."""

    exit_code: ClassVar[int] = 3


class UsageError(MegatrainError):
    """The command line or the run file is wrong."""

    exit_code: ClassVar[int] = 2


class RefusedError(MegatrainError):
    """An input or a store that cannot be used as it is; nothing was changed."""


class CorruptionError(RefusedError):
    """Bytes differ from what their manifest, index or header promises.

    ``file``, ``drive``, ``offset`` and ``record`` say where, as far as they apply. What is wrong
    lies in the ``nbytes`` from ``offset`` on; somewhere behind it where they are not known.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] = "",
        drive: int | None = None,
        offset: int | None = None,
        nbytes: int | None = None,
        record: str = "",
    ) -> None:
        self.file = os.fspath(file)
        self.drive = drive
        self.offset = offset
        self.nbytes = nbytes
        self.record = record
        super().__init__(message)


class CapacityError(RefusedError):
    """The work does not fit the memory or the drives it was given."""


class LockedError(MegatrainError):
    """Another process holds what is needed."""

    exit_code: ClassVar[int] = 4


class StorageError(MegatrainError):
    """An input or output operation failed, or moved fewer bytes than it had to.

    ``record`` is what the file belongs to, where somebody who knows has set it.
    """

    exit_code: ClassVar[int] = 5

    def __init__(
        self,
        action: str,
        path: str | os.PathLike[str],
        *,
        errno: int = 0,
        offset: int = 0,
        wanted: int = 0,
        moved: int = 0,
        hint: str = "",
    ) -> None:
        self.action = action
        self.path = Path(path)
        self.errno = errno
        self.offset = offset
        self.wanted = wanted
        self.moved = moved
        self.hint = hint
        self.record = ""
        reason = os.strerror(errno) if errno else "ended early"
        span = f" at offset {offset}: moved {moved} of {wanted} B" if wanted else ""
        room = _room(self.path) if errno in FULL else ""
        super().__init__(f"cannot {action} {self.path}{span}: {reason}{room}{hint and f'; {hint}'}")


def _room(path: Path) -> str:
    """Say what is free where ``path`` is, or would be."""
    for folder in (path, *path.parents):
        try:
            status = os.statvfs(folder)
        except OSError:
            continue
        return f", {status.f_bavail * status.f_frsize} B free"
    return ""
