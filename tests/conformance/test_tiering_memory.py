from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.numa import local_node
from tiering.arena import Arena
from tiering.backends.memory import MemoryBackend
from tiering.errors import StorageError
from tiering.testing import TransferConformance, aligned_buffer, wait_for

MIB = 1 << 20


class TestPinned(TransferConformance):
    @pytest.fixture(autouse=True)
    def _own_arena(self) -> Iterator[None]:
        self.regions: dict[Path, memoryview] = {}
        with self.make_arena(24 * MIB) as self.arena:
            yield
            self.regions.clear()
            gc.collect()

    def make_arena(self, nbytes: int) -> Arena:
        return Arena(nbytes)

    def make_file(self, folder: Path, content: bytes | memoryview, name: str = "file") -> Path:
        region = self.arena.take(name, len(content))
        region[:] = content
        self.regions[folder / name] = region
        return folder / name

    def make_backend(self, folder: Path) -> MemoryBackend:
        return MemoryBackend("pinned", self.regions)

    def content(self, path: Path) -> bytes:
        return bytes(self.regions[path])

    def test_a_view_is_the_region_and_no_copy(self, folder: Path) -> None:
        path = self.make_file(folder, bytes(4096))
        backend = self.make_backend(folder)
        backend.view(path)[:3] = b"abc"
        out = memoryview(bytearray(2))
        wait_for(backend.read(path, 1, out))
        backend.close()
        assert out == b"bc"

    def test_what_does_not_fit_a_region_is_an_error_that_counts(self, folder: Path) -> None:
        path = self.make_file(folder, bytes(10))
        backend = self.make_backend(folder)
        with pytest.raises(StorageError, match=r"cannot write .*moved 3 of 5 B") as caught:
            wait_for(backend.write(path, 7, memoryview(b"abcde")))
        backend.close()
        assert (caught.value.offset, caught.value.moved) == (10, 3)
        assert self.content(path) == bytes(7) + b"abc"

    def test_a_forgotten_region_is_missing_and_its_memory_free(self, folder: Path) -> None:
        path = self.make_file(folder, bytes(4096))
        backend = self.make_backend(folder)
        backend.forget(path)
        backend.forget(path)
        with pytest.raises(StorageError, match="No such file"):
            wait_for(backend.read(path, 0, aligned_buffer(1)))
        backend.close()


class TestCxl(TestPinned):
    """On this machine's own node, named: what is refused by itself is taken when asked for."""

    def make_arena(self, nbytes: int) -> Arena:
        return Arena(nbytes, nodes=(local_node(),))
