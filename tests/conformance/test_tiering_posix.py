from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.faults import FaultConformance
from tests.support.loops import MIB, loop_mount
from tiering.backends.posix import PosixBackend
from tiering.backends.probe import probe
from tiering.errors import StorageError
from tiering.records import ALIGNMENT
from tiering.testing import BackendConformance, aligned_buffer, wait_for


class TestBuffered(FaultConformance):
    def make_backend(self, folder: Path) -> PosixBackend:
        return PosixBackend("test", direct=False, writable=True)


class TestDirect(FaultConformance):
    def make_backend(self, folder: Path) -> PosixBackend:
        access = probe(folder)
        if not access.direct:
            pytest.skip(f"{folder}: no direct I/O: {access.reason}")
        return PosixBackend("test", direct=True, writable=True, alignment=access.alignment)


class TestDirectAsShardsLie(FaultConformance):
    """In multiples of 4096 bytes, which any drive takes that can be used directly."""

    def make_backend(self, folder: Path) -> PosixBackend:
        if not probe(folder).direct:
            pytest.skip(f"{folder}: no direct I/O")
        return PosixBackend("test", direct=True, writable=True)


class TestFewDescriptors(BackendConformance):
    def make_backend(self, folder: Path) -> PosixBackend:
        return PosixBackend("test", direct=False, writable=True, open_files=1, threads=4)

    def test_open_files_stay_bounded(self, tmp_path: Path) -> None:
        paths = [tmp_path / str(i) for i in range(20)]
        for path in paths:
            path.write_bytes(bytes(ALIGNMENT))
        backend = self.make_backend(tmp_path)
        before = len(os.listdir("/proc/self/fd"))
        for path in paths * 2:
            backend.read(path, 0, aligned_buffer(ALIGNMENT)).result()
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        backend.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(ALIGNMENT))
    backend = PosixBackend("test", direct=False, writable=False)
    with pytest.raises(StorageError, match="cannot write"):
        backend.write(path, 0, aligned_buffer(ALIGNMENT)).result()
    backend.close()
    assert path.read_bytes() == bytes(ALIGNMENT)


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    probe(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_tells_what_was_wanted_of_it(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    backend = PosixBackend("test", direct=False, writable=True)
    with pytest.raises(StorageError, match=r"cannot open .*/absent .* No such file") as caught:
        wait_for(backend.read(path, ALIGNMENT, aligned_buffer(20 << 20)))
    backend.close()
    error = caught.value
    assert (error.errno, error.path) == (errno.ENOENT, path)
    assert (error.offset, error.wanted, error.moved) == (ALIGNMENT, 20 << 20, 0)


def test_more_than_two_gib_move_in_one_request(tmp_path: Path) -> None:
    nbytes = (2 << 30) + 3 * ALIGNMENT
    tail = aligned_buffer(2 * ALIGNMENT, seed=1)
    path = tmp_path / "hole"
    with path.open("wb") as file:
        file.seek(nbytes - len(tail))
        file.write(tail)
    with _folded(nbytes) as out:
        backend = PosixBackend("test", direct=probe(tmp_path).direct, writable=False)
        assert wait_for(backend.read(path, 0, out)) == nbytes
        backend.close()
        assert out[-len(tail) :] == tail


@contextmanager
def _folded(nbytes: int) -> Iterator[memoryview]:
    """Lend a buffer whose first 2 GiB are the same 8 MiB of memory, over and over."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    fold, fd = 8 << 20, os.memfd_create("fold")
    os.ftruncate(fd, fold)
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE) as pages:
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for at in range(0, 2 << 30, fold):
            place, size = ctypes.c_void_p(start + at), ctypes.c_size_t(fold)
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED
            assert libc.mmap(place, size, protection, flags, fd, ctypes.c_long(0)) == start + at
        os.close(fd)
        with memoryview(pages) as view:
            yield view


def test_signals_that_come_all_the_time_interrupt_no_transfer(tmp_path: Path) -> None:
    data = aligned_buffer(24 << 20, seed=1)
    path = tmp_path / "file"
    path.write_bytes(bytes(len(data)))
    backend = PosixBackend("stormy", direct=probe(tmp_path).direct, writable=True)
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        _in_a_storm(backend.write(path, 0, data))
        out = aligned_buffer(len(data))
        _in_a_storm(backend.read(path, 0, out))
    finally:
        backend.close()  # a signal on its way to a thread would end the process without a handler
        signal.signal(signal.SIGUSR1, before)
    assert seen
    assert out == data


def _in_a_storm(future: Future[int]) -> None:
    """Send signals to the threads that work on ``future`` until it ends."""
    workers = [t.ident for t in threading.enumerate() if t.name.startswith("posix-stormy")]
    while True:
        for ident in workers:
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGUSR1)
        if future.done():
            break
    wait_for(future)


@pytest.mark.root
@pytest.mark.parametrize("direct", [False, True])
def test_a_full_drive_is_an_error_that_counts(tmp_path: Path, direct: bool) -> None:
    with loop_mount(tmp_path, nbytes=16 * MIB) as mount:
        path = mount.point / "file"
        with path.open("wb") as file:
            file.truncate(64 * MIB)
        backend = PosixBackend("test", direct=direct, writable=True)
        with pytest.raises(StorageError, match="No space left on device") as caught:
            wait_for(backend.write(path, 0, aligned_buffer(64 * MIB, seed=1)))
        backend.close()
    error = caught.value
    assert (error.errno, error.path, error.wanted) == (errno.ENOSPC, path, 64 * MIB)
    assert error.offset == error.moved < 16 * MIB


@pytest.mark.root
def test_a_drive_that_loses_its_blocks_is_an_error_that_counts(tmp_path: Path) -> None:
    with loop_mount(tmp_path, nbytes=64 * MIB) as mount:
        path = mount.point / "file"
        path.write_bytes(aligned_buffer(24 * MIB, seed=1))
        os.sync()
        os.truncate(mount.image, 4096)
        backend = PosixBackend("test", direct=True, writable=False)
        with pytest.raises(StorageError, match="Input/output error") as caught:
            wait_for(backend.read(path, 0, aligned_buffer(24 * MIB)))
        backend.close()
    assert (caught.value.errno, caught.value.wanted) == (errno.EIO, 24 * MIB)
    assert caught.value.path == path


def test_a_drive_that_cannot_be_written_is_no_drive(tmp_path: Path) -> None:
    """Even as root: the kernel's own files take no new one."""
    access = probe(Path("/proc/self"))
    assert not access.direct
    assert access.reason.startswith("the trial failed: ")


def test_small_requests_are_moved_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, together, preadv = tmp_path / "file", threading.Barrier(3), os.preadv
    path.write_bytes(b"abc")

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        together.wait(timeout=30)
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", read)
    backend = PosixBackend("test", direct=False, writable=False)
    views = [memoryview(bytearray(1)) for _ in range(3)]
    for future in [backend.read(path, at, view) for at, view in enumerate(views)]:
        future.result()
    backend.close()
    assert b"".join(views) == b"abc"


def test_a_thread_that_cannot_be_started_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(aligned_buffer(4 * MIB, seed=1))
    start, left = threading.Thread.start, iter([True])

    def start_one(thread: threading.Thread) -> None:
        if not next(left, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    backend = PosixBackend("test", direct=False, writable=False)
    out = aligned_buffer(4 * MIB)
    assert wait_for(backend.read(path, 0, out)) == 4 * MIB
    assert bytes(out) == path.read_bytes()
    backend.close()
    with pytest.raises(ValueError, match="was closed"):
        backend.read(path, 0, out)
