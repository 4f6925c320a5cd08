"""What every backend must do. Subclass ``BackendConformance`` in a test module and give it one.

The tests need pytest; this module is imported by tests only.
"""

# ruff: noqa: D102 - the name of a test is its documentation
from __future__ import annotations

import abc
import mmap
import resource
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import pytest

from tiering.errors import MegatrainError, StorageError
from tiering.recordio import RecordFiles, ShardBackend
from tiering.records import ALIGNMENT, Record, round_up
from tiering.slots import Shard

PATIENCE_S = 120  # a future that has not ended by then never will

# Around a page, around the largest request, and no multiple of anything.
LENGTHS = (1, 5, 4095, 4096, 4097, 100_003, (8 << 20) - 1, 8 << 20, (8 << 20) + 4096, 17_000_001)


class Backend(Protocol):
    """What the suite calls."""

    @property
    def alignment(self) -> int:
        """Offsets, lengths and addresses of a transfer are multiples of this; 1: any will do."""

    def read(self, path: Path, offset: int, out: memoryview) -> Future[int]:
        """Fill ``out`` from ``offset``."""

    def write(self, path: Path, offset: int, data: memoryview) -> Future[int]:
        """Write ``data`` at ``offset``."""

    def forget(self, path: Path) -> None:
        """Close a file that is about to be removed or replaced."""

    def close(self) -> None:
        """Wait for what is in flight; later transfers raise."""


def aligned_buffer(nbytes: int, seed: int | None = None) -> memoryview:
    """Return a buffer at a page boundary: zeros, or random bytes of ``seed``."""
    buffer = memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE))[:nbytes]
    if seed is not None:
        buffer[:] = np.random.default_rng(seed).bytes(nbytes)
    return buffer


def unaligned_buffer(nbytes: int, seed: int | None = None, *, start: int = 1) -> memoryview:
    """Return a buffer ``start`` bytes after a page boundary."""
    buffer = aligned_buffer(start + nbytes)[start:]
    if seed is not None:
        buffer[:] = np.random.default_rng(seed).bytes(nbytes)
    return buffer


def wait_for(future: Future[int]) -> int:
    """Return what ``future`` ends with; a hang is a failure."""
    return future.result(timeout=PATIENCE_S)


class TransferConformance(abc.ABC):
    """Transfers are exact, complete or an error, and errors reach whoever waits.

    The part of the suite that memory can pass, too: nothing here needs a file system.

    Attributes:
        whole_files: Whether a file is written only as a whole: from its first byte to its last,
            in order, replacing the old one when the last byte has come.
        missing: What a missing file is; its message names the file.
    """

    whole_files: ClassVar[bool] = False
    missing: ClassVar[type[MegatrainError]] = StorageError

    @abc.abstractmethod
    def make_backend(self, folder: Path) -> Backend:
        """Return a writable backend for the files that ``make_file`` made and will make."""

    @abc.abstractmethod
    def make_file(self, folder: Path, content: bytes | memoryview, name: str = "file") -> Path:
        """Create or replace a file; its length never changes afterwards."""

    @abc.abstractmethod
    def content(self, path: Path) -> bytes:
        """Return what the file holds, not asking the backend."""

    @pytest.fixture(name="folder")
    def _folder(self, tmp_path: Path) -> Path:
        return tmp_path

    def put(self, backend: Backend, path: Path, data: memoryview) -> int:
        """Write a whole file; in pieces where the order of pieces matters."""
        if not self.whole_files:
            return wait_for(backend.write(path, 0, data))
        piece = max(1, len(data) // 3)
        return sum(
            wait_for(backend.write(path, at, data[at : at + piece]))
            for at in range(0, len(data), piece)
        )

    def require_ranges(self) -> None:
        if self.whole_files:
            pytest.skip("writes whole files only")

    @pytest.mark.parametrize("nbytes", LENGTHS)
    def test_what_is_written_is_read_back(self, folder: Path, nbytes: int) -> None:
        align = self.alignment(folder)
        nbytes = round_up(nbytes, align)
        path = self.make_file(folder, bytes(nbytes))
        backend = self.make_backend(folder)
        data, out = aligned_buffer(nbytes, seed=nbytes), aligned_buffer(nbytes)
        assert self.put(backend, path, data) == nbytes
        assert wait_for(backend.read(path, 0, out)) == nbytes
        backend.close()
        assert out == data
        assert self.content(path) == data

    def alignment(self, folder: Path) -> int:
        backend = self.make_backend(folder)
        backend.close()
        return backend.alignment

    def test_the_announced_alignment_divides_that_of_our_files(self, folder: Path) -> None:
        align = self.alignment(folder)
        assert 1 <= align <= ALIGNMENT
        assert ALIGNMENT % align == 0

    def test_every_multiple_of_the_alignment_is_an_address_and_an_offset(
        self, folder: Path
    ) -> None:
        align, nbytes = self.alignment(folder), 3 * ALIGNMENT
        data = aligned_buffer(nbytes, seed=1)
        path = self.make_file(folder, data)
        backend = self.make_backend(folder)
        for step in (1, 3, 7):
            at = step * align
            count = max(align, (ALIGNMENT - 2 * at) // align * align) if at < 2048 else align
            if at + count > nbytes:
                continue
            out = unaligned_buffer(count, start=at)
            assert wait_for(backend.read(path, at, out)) == count
            assert out == data[at : at + count]
        backend.close()

    def test_a_write_changes_only_its_own_range(self, folder: Path) -> None:
        self.require_ranges()
        before = aligned_buffer(5 * ALIGNMENT, seed=1)
        path = self.make_file(folder, before)
        backend = self.make_backend(folder)
        at, count = 3 * backend.alignment, 5 * backend.alignment
        if at + count > len(before):
            at, count = ALIGNMENT, 2 * ALIGNMENT
        wait_for(backend.write(path, at, unaligned_buffer(count, 2, start=backend.alignment)))
        backend.close()
        after = self.content(path)
        assert after[at : at + count] == unaligned_buffer(count, 2)
        assert after[:at] == before[:at]
        assert after[at + count :] == before[at + count :]

    def test_a_misaligned_transfer_is_refused_before_it_moves(self, folder: Path) -> None:
        align = self.alignment(folder)
        if align == 1:
            pytest.skip("takes any alignment")
        content = aligned_buffer(4 * align, seed=1)
        path = self.make_file(folder, content)
        backend = self.make_backend(folder)
        pages = aligned_buffer(3 * align)
        wrong = [(align // 2, pages[:align]), (0, pages[1 : 1 + align]), (0, pages[: align - 1])]
        for offset, view in wrong:
            for submit in (backend.read, backend.write):
                with pytest.raises(ValueError, match=f"multiples of {align}"):
                    wait_for(submit(path, offset, view))
        backend.close()
        assert bytes(pages) == bytes(len(pages))
        assert self.content(path) == content

    def test_nothing_takes_no_time_and_moves_nothing(self, folder: Path) -> None:
        path = self.make_file(folder, bytes(ALIGNMENT))
        backend = self.make_backend(folder)
        assert wait_for(backend.read(path, 0, aligned_buffer(0))) == 0
        backend.close()

    @pytest.mark.parametrize("blocks", [4, 6000])
    def test_the_end_of_the_file_is_an_error_that_counts(self, folder: Path, blocks: int) -> None:
        path = self.make_file(folder, bytes(3 * ALIGNMENT))
        backend = self.make_backend(folder)
        wanted = blocks * ALIGNMENT
        with pytest.raises(StorageError, match="ended early") as caught:
            wait_for(backend.read(path, ALIGNMENT, aligned_buffer(wanted)))
        backend.close()
        error = caught.value
        assert (error.path, error.errno, error.wanted) == (path, 0, wanted)
        assert (error.offset, error.moved) == (3 * ALIGNMENT, 2 * ALIGNMENT)

    def test_an_error_reaches_its_own_waiter_and_nobody_else(self, folder: Path) -> None:
        content = aligned_buffer(16 * ALIGNMENT, seed=1)
        path = self.make_file(folder, content)
        backend = self.make_backend(folder)
        outs = [aligned_buffer(2 * ALIGNMENT) for _ in range(17)]
        reads = [backend.read(path, i * ALIGNMENT, out) for i, out in enumerate(outs)]
        for i in (15, 16):  # one reaches past the end, one begins there
            with pytest.raises(StorageError) as caught:
                wait_for(reads[i])
            assert (caught.value.offset, caught.value.moved) == (len(content), (16 - i) * ALIGNMENT)
        assert [wait_for(read) for read in reads[:15]] == [2 * ALIGNMENT] * 15
        assert wait_for(backend.read(path, 0, outs[16])) == 2 * ALIGNMENT
        backend.close()
        assert outs[16] == outs[0] == content[: 2 * ALIGNMENT]

    def test_a_missing_file_is_an_error_and_is_not_created(self, folder: Path) -> None:
        self.make_file(folder, bytes(ALIGNMENT))
        backend = self.make_backend(folder)
        path = folder / "absent"
        for submit in (backend.read, backend.write):
            with pytest.raises(self.missing, match="absent"):
                wait_for(submit(path, 0, aligned_buffer(ALIGNMENT)))
        backend.close()
        assert not path.exists()

    def test_a_buffer_that_may_not_be_written_is_an_error(self, folder: Path) -> None:
        path = self.make_file(folder, b"\x07" * ALIGNMENT)
        backend = self.make_backend(folder)
        out = aligned_buffer(ALIGNMENT)
        with pytest.raises((TypeError, ValueError, BufferError)):
            wait_for(backend.read(path, 0, out.toreadonly()))
        backend.close()
        assert bytes(out) == bytes(ALIGNMENT)

    def test_many_threads_move_their_own_ranges(self, folder: Path) -> None:
        self.require_ranges()
        count, nbytes = 16, 4 * ALIGNMENT
        path = self.make_file(folder, bytes(count * nbytes))
        backend = self.make_backend(folder)
        parts = [aligned_buffer(nbytes, seed=i) for i in range(count)]

        def move(i: int) -> bool:
            wait_for(backend.write(path, i * nbytes, parts[i]))
            out = aligned_buffer(nbytes)
            wait_for(backend.read(path, i * nbytes, out))
            return out == parts[i]

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(move, range(count)))
        backend.close()
        assert self.content(path) == b"".join(parts)

    def test_many_threads_move_their_own_files(self, folder: Path) -> None:
        count, nbytes = 8, 4 * ALIGNMENT
        paths = [self.make_file(folder, bytes(nbytes), str(i)) for i in range(count)]
        backend = self.make_backend(folder)
        parts = [aligned_buffer(nbytes, seed=i) for i in range(count)]

        def move(i: int) -> bool:
            self.put(backend, paths[i], parts[i])
            out = aligned_buffer(nbytes)
            wait_for(backend.read(paths[i], 0, out))
            return out == parts[i]

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(move, range(count)))
        backend.close()
        assert [self.content(path) for path in paths] == parts

    def test_many_readers_share_a_file(self, folder: Path) -> None:
        content = aligned_buffer(64 * ALIGNMENT, seed=3)
        path = self.make_file(folder, content)
        backend = self.make_backend(folder)
        outs = [aligned_buffer(32 * ALIGNMENT) for _ in range(16)]
        reads = [backend.read(path, i * ALIGNMENT, out) for i, out in enumerate(outs)]
        assert [wait_for(read) for read in reads] == [32 * ALIGNMENT] * 16
        backend.close()
        for i, out in enumerate(outs):
            assert out == content[i * ALIGNMENT : (i + 32) * ALIGNMENT]

    def test_what_was_submitted_before_close_completes(self, folder: Path) -> None:
        count, nbytes = 12, 64 * ALIGNMENT
        content = aligned_buffer(nbytes, seed=1)
        source = self.make_file(folder, content, "source")
        paths = [self.make_file(folder, bytes(nbytes), str(i)) for i in range(count)]
        backend = self.make_backend(folder)
        outs = [aligned_buffer(nbytes) for _ in range(count)]
        futures = [backend.read(source, 0, out) for out in outs]
        futures += [backend.write(path, 0, content) for path in paths]
        backend.close()
        assert all(future.done() for future in futures)
        assert [wait_for(future) for future in futures] == [nbytes] * (2 * count)
        assert outs == [content] * count
        assert [self.content(path) for path in paths] == [content] * count

    def test_a_closed_backend_takes_nothing(self, folder: Path) -> None:
        path = self.make_file(folder, b"\x07" * ALIGNMENT)
        backend = self.make_backend(folder)
        backend.close()
        backend.close()
        for submit in (backend.read, backend.write):
            with pytest.raises((RuntimeError, ValueError, StorageError)):
                wait_for(submit(path, 0, aligned_buffer(ALIGNMENT)))
        assert self.content(path) == b"\x07" * ALIGNMENT

    def test_an_unfinished_file_is_never_visible(self, folder: Path) -> None:
        if not self.whole_files:
            pytest.skip("writes ranges in place")
        before, after = (aligned_buffer(4 * ALIGNMENT, seed=i) for i in (1, 2))
        path = self.make_file(folder, before)
        backend = self.make_backend(folder)
        wait_for(backend.write(path, 0, after[:ALIGNMENT]))
        assert self.content(path) == before
        wait_for(backend.write(path, ALIGNMENT, after[ALIGNMENT:]))
        assert self.content(path) == after
        backend.close()

    @pytest.mark.parametrize("nbytes", [1, 2, 4095, 4096, 4098, 12_289, 70_000])
    def test_records_of_any_length_move_through_it(self, folder: Path, nbytes: int) -> None:
        record = Record(name="r", dtype="uint8", length=nbytes)
        padded = record.geometry.chunk_count * record.geometry.chunk_nbytes
        data = unaligned_buffer(nbytes, seed=nbytes, start=3)
        path = self.make_file(
            folder, bytes(padded) if not self.whole_files else _zero_padded(data, padded)
        )
        backend = self.make_backend(folder)
        files = RecordFiles([backend].__getitem__, no_encoded_shards)
        files.attach(0, {"r": record}, {"r": (Shard(drive=0, path=path),)})
        if not self.whole_files:
            files.write(0, "r", 0, data)
        for offset in {0, 1, nbytes // 2, nbytes - 1}:
            out = unaligned_buffer(nbytes - offset, start=5)
            files.read(0, "r", offset, out)
            assert out == data[offset:]
        backend.close()
        assert self.content(path) == _zero_padded(data, padded)


def no_encoded_shards(drive: int) -> ShardBackend:
    """Stand where a store has no backend for encoded shards."""
    raise AssertionError(f"drive {drive} has no encoded shards")


def _zero_padded(data: memoryview, nbytes: int) -> bytes:
    return bytes(data) + bytes(nbytes - len(data))


class BackendConformance(TransferConformance):
    """The whole suite, for backends whose files lie in a folder of a file system."""

    def make_file(self, folder: Path, content: bytes | memoryview, name: str = "file") -> Path:
        path = folder / name
        path.write_bytes(content)
        return path

    def content(self, path: Path) -> bytes:
        return path.read_bytes()

    def test_a_forgotten_file_is_opened_anew(self, folder: Path) -> None:
        path = self.make_file(folder, bytes(ALIGNMENT))
        backend = self.make_backend(folder)
        out = aligned_buffer(ALIGNMENT)
        wait_for(backend.read(path, 0, out))
        backend.forget(path)
        path.unlink()
        self.make_file(folder, b"\x07" * ALIGNMENT)
        wait_for(backend.read(path, 0, out))
        backend.close()
        assert out == b"\x07" * ALIGNMENT

    def test_no_descriptor_outlives_the_backend(self, folder: Path) -> None:
        path = self.make_file(folder, bytes(ALIGNMENT))
        before = _descriptors()
        backend = self.make_backend(folder)
        wait_for(backend.read(path, 0, aligned_buffer(ALIGNMENT)))
        backend.close()
        assert _descriptors() == before

    def test_a_write_that_the_system_cuts_short_is_an_error_that_counts(self, folder: Path) -> None:
        self.require_ranges()
        nbytes, limit = 12 * ALIGNMENT, 5 * ALIGNMENT
        path = self.make_file(folder, bytes(nbytes))
        backend = self.make_backend(folder)
        with file_size_limit(limit), pytest.raises(StorageError, match="too large") as caught:
            wait_for(backend.write(path, ALIGNMENT, aligned_buffer(nbytes - ALIGNMENT, seed=1)))
        backend.close()
        error = caught.value
        assert (error.path, error.errno) == (path, 27)  # EFBIG
        assert (error.wanted, error.moved) == (nbytes - ALIGNMENT, limit - ALIGNMENT)
        assert error.offset == limit


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond, or be written beyond, ``nbytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}
