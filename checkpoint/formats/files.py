"""Reading files that others wrote: whole small ones, ranges of large ones, and JSON."""

from __future__ import annotations

import errno as errnos
import json
import os
import re
import stat
from collections import Counter, OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiering.errors import CorruptionError, RefusedError, StorageError

MAX_OPEN = 16
BOM = b"\xef\xbb\xbf"


def file_nbytes(path: Path) -> int:
    """Return the length of a regular file, seen through links."""
    try:
        status = path.stat()
    except OSError as error:
        if error.errno in (errnos.ENOENT, errnos.ELOOP) and path.is_symlink():
            target = path.readlink()
            raise RefusedError(f"{path}: a link to {target}, which is not there") from error
        raise StorageError("open", path, errno=error.errno or 0) from error
    if not stat.S_ISREG(status.st_mode):
        raise RefusedError(f"{path}: not a regular file")
    return status.st_size


def read_small(path: Path, limit: int) -> bytes:
    """Return the content of a file of at most ``limit`` bytes."""
    if (nbytes := file_nbytes(path)) > limit:
        raise RefusedError(f"{path}: {nbytes} B, expected at most {limit} B")
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError("read", path, errno=error.errno or 0) from error


def plain(name: str) -> str:
    """Return a file's name as text on one line; such a name need not be one."""
    return name if name.isprintable() else repr(name)[1:-1]


def stands_for(start: bytes) -> str:
    """Say that a file that begins so is a Git LFS pointer; nothing if it is none."""
    if not start.startswith(b"version https://git-lfs"):
        return ""
    size = re.search(rb"\nsize (\d+)", start)
    of = f" for a file of {int(size[1])} B" if size else ""
    return f"it is a Git LFS pointer{of}; fetch the real file, for example with `git lfs pull`"


def parse_object(data: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in ``data``; a byte-order mark in front of it is allowed."""
    if kind := stands_for(data):
        raise CorruptionError(f"{path}: not JSON: {kind}")
    try:
        document = json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique_pairs)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise CorruptionError(f"{path}: not JSON: {error.msg} at {where}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CorruptionError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's pairs as a dictionary; ValueError when a key is there twice."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0]!r} is there twice")
    return unique


class RangeReader:
    """Reads exact ranges of files; a bounded number of them stay open. For one thread."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, path: Path, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes of ``path`` from ``offset`` on.

        Raises:
            StorageError: The file cannot be read, or ends early.
        """
        descriptor, moved, wanted = self._descriptor(path), 0, out.nbytes
        while moved < wanted:
            try:
                count = os.preadv(descriptor, [out[moved:]], offset + moved)
            except OSError as error:
                raise _failed(path, offset, wanted, moved, error.errno or 0) from error
            if not count:
                raise _failed(path, offset, wanted, moved, 0)
            moved += count

    def _descriptor(self, path: Path) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        try:
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError("open", path, errno=error.errno or 0) from error
        return self._open[path]


def _failed(path: Path, offset: int, wanted: int, moved: int, errno: int) -> StorageError:
    return StorageError("read", path, errno=errno, offset=offset, wanted=wanted, moved=moved)
