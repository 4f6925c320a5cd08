"""Bytes that need not outlive the process: files without a name, gone with whoever made them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from tiering.backends.probe import open_unnamed
from tiering.errors import FULL, CapacityError, StorageError
from tiering.opened import OpenStore
from tiering.records import ALIGNMENT, round_up


class Scratch:
    """One file without a name per entry of ``sizes``, spread over the drives of ``store``.

    The space is reserved at once. Transfers block and are thread-safe; offsets, lengths and
    buffers are multiples of 4096.

    Raises:
        CapacityError: A drive has no room for them.

    Attributes:
        read_bytes: Bytes read so far.
        written_bytes: Bytes written so far.
    """

    def __init__(self, store: OpenStore, sizes: Mapping[str, int]) -> None:
        self._store = store
        self._files: dict[str, tuple[int, int, int]] = {}  # name -> descriptor, drive, bytes
        self._guard = threading.Lock()
        self.read_bytes = 0
        self.written_bytes = 0
        try:
            for index, (name, nbytes) in enumerate(sizes.items()):
                drive = index % len(store.drives)
                self._files[name] = (*self._make(name, drive, nbytes), round_up(nbytes, ALIGNMENT))
        except BaseException:
            self.close()
            raise

    def _make(self, name: str, drive: int, nbytes: int) -> tuple[int, int]:
        folder = self._store.drives[drive].folder
        direct = os.O_DIRECT if self._store.backends[drive].direct else 0
        try:
            fd = open_unnamed(folder, direct)
        except OSError as error:
            raise StorageError("create scratch in", folder, errno=error.errno or 0) from error
        try:
            os.posix_fallocate(fd, 0, max(round_up(nbytes, ALIGNMENT), ALIGNMENT))
        except OSError as error:
            os.close(fd)
            if error.errno not in FULL:
                raise StorageError(
                    "reserve scratch in", folder, errno=error.errno or 0, wanted=nbytes
                ) from error
            free = self._store.drives[drive].free_nbytes()
            raise CapacityError(
                f"drive {drive} full: scratch {name} needs {nbytes} B in {folder}, {free} B free"
            ) from error
        return fd, drive

    def read(self, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with what was written at ``offset``; zeros where nothing was."""
        fd, drive = self._checked(name, offset, memoryview(out).nbytes)
        with self._store.waits.on([self._store.drives[drive].folder]):
            moved = self._store.backends[drive].read(fd, offset, out).result()
        with self._guard:
            self.read_bytes += moved

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``."""
        fd, drive = self._checked(name, offset, memoryview(data).nbytes)
        with self._store.waits.on([self._store.drives[drive].folder]):
            moved = self._store.backends[drive].write(fd, offset, data).result()
        with self._guard:
            self.written_bytes += moved

    def _checked(self, name: str, offset: int, nbytes: int) -> tuple[int, int]:
        fd, drive, size = self._files[name]
        if offset < 0 or offset + nbytes > size:
            raise ValueError(f"scratch {name}: {nbytes} B at {offset} reach past its {size} B")
        return fd, drive

    def close(self) -> None:
        """Give the space back."""
        while self._files:
            os.close(self._files.popitem()[1][0])

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
