"""Open files by path, as many as may be open at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

Handle = TypeVar("Handle")


@dataclass(slots=True)
class _Open(Generic[Handle]):
    handle: Handle
    users: int = 0
    forgotten: bool = False


class OpenFiles(Generic[Handle]):
    """Open files, the longest unused closed first; one in use is never closed. Thread-safe."""

    def __init__(
        self,
        open_file: Callable[[Path], Handle],
        close_file: Callable[[Handle], None],
        capacity: int,
    ) -> None:
        self._open_file = open_file
        self._close_file = close_file
        self._capacity = capacity
        self._guard = threading.Lock()
        self._files: OrderedDict[Path, _Open[Handle]] = OrderedDict()

    @contextmanager
    def lease(self, path: Path) -> Iterator[Handle]:
        """Lend the open file at ``path``; it stays open until the context ends."""
        with self._guard:
            entry = self._acquire(path)
        try:
            yield entry.handle
        finally:
            with self._guard:
                self._release(entry)

    def _acquire(self, path: Path) -> _Open[Handle]:
        entry = self._files.get(path)
        if entry is None:
            entry = self._files[path] = _Open(self._open_file(path))
        self._files.move_to_end(path)
        entry.users += 1
        self._evict()
        return entry

    def _release(self, entry: _Open[Handle]) -> None:
        entry.users -= 1
        if entry.forgotten and not entry.users:
            self._close_file(entry.handle)

    def _evict(self) -> None:
        idle = (path for path, entry in self._files.items() if not entry.users)
        for path in list(idle)[: max(0, len(self._files) - self._capacity)]:
            self._close_file(self._files.pop(path).handle)

    def forget(self, path: Path) -> None:
        """Open ``path`` anew from now on; one that is in use is closed after that."""
        with self._guard:
            entry = self._files.pop(path, None)
            if entry is not None:
                entry.forgotten = True
                entry.users += 1
                self._release(entry)

    def close(self) -> None:
        """Close every file; none may be in use."""
        with self._guard:
            while self._files:
                self._close_file(self._files.popitem()[1].handle)
