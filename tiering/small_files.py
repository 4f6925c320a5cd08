"""Files that are read whole: only regular ones, and no more of them than they can sensibly have.

A store comes from elsewhere as often as not. A FIFO in the place of a file would keep its reader
for ever, a device may do anything, and a file without end takes all memory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from tiering.errors import CorruptionError, StorageError

MIB = 1 << 20
DOCUMENT_MOST = 16 * MIB  # of JSON: root, manifest, the metadata of an array, the list of a schema
SCHEMA_MOST = 256 * MIB  # of a schema file: tokenizers are tens of megabytes
LABEL_MOST = MIB

_NO_FILE = frozenset(
    {errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.ENXIO, errno.ENODEV}
)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link"),
)


def kind_of(mode: int) -> str:
    """Return what a file that is not a regular one is."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")


def read_small(path: Path, most: int = DOCUMENT_MOST) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises:
        FileNotFoundError: There is nothing of that name.
        CorruptionError: It is no regular file, or a longer one.
        StorageError: It cannot be read.
    """
    try:
        _require_regular(path, os.stat(path), most)
        # without O_NONBLOCK it could still become a FIFO in between
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            _require_regular(path, os.fstat(fd), most)
            data = file.read(most + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _NO_FILE:
            raise CorruptionError(
                f"{path}: {os.strerror(error.errno)}, expected a file", file=path
            ) from error
        raise StorageError("read", path, errno=error.errno or 0) from error
    if len(data) > most:
        raise _too_long(path, f"more than {most}", most)
    return data


def _require_regular(path: Path, status: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CorruptionError(f"{path}: is {kind_of(status.st_mode)}, expected a file", file=path)
    if status.st_size > most:
        raise _too_long(path, str(status.st_size), most)


def _too_long(path: Path, found: str, most: int) -> CorruptionError:
    return CorruptionError(f"{path}: has {found} B, expected at most {most} B", file=path)


def require_own_folders(parent: Path, names: Iterable[str]) -> None:
    """Refuse folders of a store that are links: what is removed below them would be elsewhere.

    Raises:
        CorruptionError: One is there and is no folder.
    """
    for name in names:
        path = parent / name
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError("look at", path, errno=error.errno or 0) from error
        if not stat.S_ISDIR(mode):
            what = "a file" if stat.S_ISREG(mode) else kind_of(mode)
            raise CorruptionError(f"{path}: is {what}, expected a folder", file=path)
