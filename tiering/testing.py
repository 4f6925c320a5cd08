"""What every backend must do. Subclass ``BackendConformance`` in a test module and give it one.

The tests need pytest; this module is imported by tests only.
"""

# ruff: noqa: D102 - the name of a test is its documentation
from __future__ import annotations

import abc
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from tiering.errors import StorageError
from tiering.records import ALIGNMENT


class Backend(Protocol):
    """What the suite calls."""

    def read(self, path: Path, offset: int, out: memoryview) -> Future[int]:
        """Fill ``out`` from ``offset``."""

    def write(self, path: Path, offset: int, data: memoryview) -> Future[int]:
        """Write ``data`` at ``offset``."""

    def forget(self, path: Path) -> None:
        """Close a file that is about to be removed."""

    def close(self) -> None:
        """Wait for what is in flight."""


def aligned_buffer(nbytes: int, seed: int | None = None) -> memoryview:
    """Return a buffer at a page boundary: zeros, or random bytes of ``seed``."""
    buffer = memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE))[:nbytes]
    if seed is not None:
        buffer[:] = np.random.default_rng(seed).bytes(nbytes)
    return buffer


class BackendConformance(abc.ABC):
    """Transfers are exact, complete or an error, and errors reach whoever waits."""

    @abc.abstractmethod
    def make_backend(self, folder: Path) -> Backend:
        """Return a backend that reads and writes files in ``folder``."""

    @pytest.fixture(name="folder")
    def _folder(self, tmp_path: Path) -> Path:
        return tmp_path

    def make_file(self, folder: Path, content: bytes | memoryview) -> Path:
        """Create the file that a test works on."""
        path = folder / "file"
        path.write_bytes(content)
        return path

    @pytest.mark.parametrize("blocks", [1, 3, 2048, 2049, 4100])
    def test_what_is_written_is_read_back(self, folder: Path, blocks: int) -> None:
        nbytes = blocks * ALIGNMENT
        path = self.make_file(folder, bytes(nbytes))
        backend = self.make_backend(folder)
        data, out = aligned_buffer(nbytes, seed=blocks), aligned_buffer(nbytes)
        assert backend.write(path, 0, data).result() == nbytes
        assert backend.read(path, 0, out).result() == nbytes
        backend.close()
        assert out == data
        assert path.read_bytes() == data

    def test_a_write_changes_only_its_own_range(self, folder: Path) -> None:
        before = aligned_buffer(5 * ALIGNMENT + 37, seed=1)
        path = self.make_file(folder, before)
        backend = self.make_backend(folder)
        data = aligned_buffer(2 * ALIGNMENT, seed=2)
        backend.write(path, ALIGNMENT, data).result()
        backend.close()
        after = path.read_bytes()
        assert after[ALIGNMENT : 3 * ALIGNMENT] == data
        assert after[:ALIGNMENT] == before[:ALIGNMENT]
        assert after[3 * ALIGNMENT :] == before[3 * ALIGNMENT :]

    def test_nothing_takes_no_time_and_moves_nothing(self, folder: Path) -> None:
        path = self.make_file(folder, bytes(ALIGNMENT))
        backend = self.make_backend(folder)
        assert backend.read(path, 0, aligned_buffer(0)).result() == 0
        backend.close()

    def test_the_end_of_the_file_is_an_error_that_counts(self, folder: Path) -> None:
        path = self.make_file(folder, bytes(3 * ALIGNMENT))
        backend = self.make_backend(folder)
        future = backend.read(path, ALIGNMENT, aligned_buffer(4 * ALIGNMENT))
        with pytest.raises(StorageError, match="ended early") as caught:
            future.result()
        backend.close()
        error = caught.value
        assert (error.path, error.wanted, error.moved) == (path, 4 * ALIGNMENT, 2 * ALIGNMENT)

    def test_a_missing_file_is_an_error_and_is_not_created(self, folder: Path) -> None:
        backend = self.make_backend(folder)
        path = folder / "absent"
        for submit in (backend.read, backend.write):
            with pytest.raises(StorageError, match="absent") as caught:
                submit(path, 0, aligned_buffer(ALIGNMENT)).result()
            assert caught.value.exit_code == 5
        backend.close()
        assert not path.exists()

    def test_an_error_in_any_piece_reaches_the_waiter(self, folder: Path) -> None:
        path = self.make_file(folder, bytes(9 << 20))
        backend = self.make_backend(folder)
        future = backend.read(path, 0, aligned_buffer(40 << 20))
        with pytest.raises(StorageError):
            future.result()
        backend.close()

    def test_many_threads_move_their_own_ranges(self, folder: Path) -> None:
        count, nbytes = 16, 4 * ALIGNMENT
        path = self.make_file(folder, bytes(count * nbytes))
        backend = self.make_backend(folder)
        parts = [aligned_buffer(nbytes, seed=i) for i in range(count)]
        with ThreadPoolExecutor(4) as threads:
            list(
                threads.map(
                    lambda i: backend.write(path, i * nbytes, parts[i]).result(), range(count)
                )
            )
        backend.close()
        assert path.read_bytes() == b"".join(parts)

    def test_a_forgotten_file_is_opened_anew(self, folder: Path) -> None:
        path = self.make_file(folder, bytes(ALIGNMENT))
        backend = self.make_backend(folder)
        out = aligned_buffer(ALIGNMENT)
        backend.read(path, 0, out).result()
        backend.forget(path)
        path.unlink()
        self.make_file(folder, b"\x07" * ALIGNMENT)
        backend.read(path, 0, out).result()
        backend.close()
        assert out == b"\x07" * ALIGNMENT
