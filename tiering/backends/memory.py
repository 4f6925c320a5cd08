"""Regions of memory that are read and written like files, and lent without a copy."""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from tiering.errors import StorageError


class MemoryBackend:
    """Named regions of one arena. Thread-safe, as far as no two transfers touch the same bytes.

    A transfer is a copy that is done when the call returns. Regions have a fixed length; nothing
    is made that was not given at the start.
    """

    def __init__(self, name: str, regions: Mapping[Path, memoryview]) -> None:
        self._name = name
        self._regions: dict[Path, memoryview] | None = dict(regions)
        self._idle = threading.Condition()
        self._users = 0

    @property
    def alignment(self) -> int:
        """Any offset, length and address will do."""
        return 1

    def read(self, path: Path, offset: int, out: memoryview) -> Future[int]:
        """Fill ``out`` with the bytes at ``offset``.

        Raises:
            StorageError: In the future: there is no such region, or it ends early.
        """
        return self._transfer("read", path, offset, memoryview(out).cast("B"))

    def write(self, path: Path, offset: int, data: memoryview) -> Future[int]:
        """Copy ``data`` to ``offset`` of a region."""
        return self._transfer("write", path, offset, memoryview(data).cast("B"))

    def view(self, path: Path) -> memoryview:
        """Return the bytes of a region, not a copy: what is written into it is the region.

        It must be gone before the arena that it lies in is closed.
        """
        return self._open()[path]

    def forget(self, path: Path) -> None:
        """Let go of a region, so that its memory can be used for something else."""
        self._open().pop(path, None)

    def close(self) -> None:
        """Wait for what is in flight and let go of every region; later transfers raise."""
        with self._idle:
            self._idle.wait_for(lambda: not self._users)
            self._regions = None

    def _open(self) -> dict[Path, memoryview]:
        if self._regions is None:
            raise ValueError(f"{self._name} is closed")
        return self._regions

    def _transfer(self, action: str, path: Path, offset: int, view: memoryview) -> Future[int]:
        with self._idle:
            region = self._open().get(path)
            self._users += 1
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(_copied(action, path, region, offset, view))
        except (StorageError, ValueError) as error:
            future.set_exception(error)
        finally:
            del region
            with self._idle:
                self._users -= 1
                self._idle.notify_all()
        return future


def _copied(
    action: str, path: Path, region: memoryview | None, offset: int, view: memoryview
) -> int:
    wanted = len(view)
    if region is None:
        raise StorageError(action, path, errno=errno.ENOENT, offset=offset, wanted=wanted)
    count = max(0, min(wanted, len(region) - offset))
    if count:
        place = np.frombuffer(region[offset : offset + count], np.uint8)
        other = np.frombuffer(view[:count], np.uint8)
        target, source = (other, place) if action == "read" else (place, other)
        np.copyto(target, source)  # lets other threads run meanwhile, unlike a slice of a view
    if count < wanted:
        raise StorageError(action, path, offset=offset + count, wanted=wanted, moved=count)
    return count
