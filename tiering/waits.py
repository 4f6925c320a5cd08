"""Who waits for which file: what a hung transfer is known by."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class Waits:
    """The files that threads wait for at this moment. Thread-safe."""

    def __init__(self) -> None:
        self._of: dict[int, Sequence[Path]] = {}

    @contextmanager
    def on(self, paths: Sequence[Path]) -> Iterator[None]:
        """Say that this thread waits for ``paths`` until the context ends."""
        thread = threading.get_ident()
        self._of[thread] = paths
        try:
            yield
        finally:
            del self._of[thread]

    def of(self, thread: int) -> Sequence[Path]:
        """Return what the thread with that identity waits for; nothing if it does not wait."""
        return self._of.get(thread, ())
