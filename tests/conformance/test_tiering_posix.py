from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.faults import FaultConformance
from tiering.backends.open_files import OpenFiles
from tiering.backends.posix import PosixBackend
from tiering.backends.probe import probe
from tiering.errors import StorageError
from tiering.records import ALIGNMENT
from tiering.testing import BackendConformance, aligned_buffer


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


def test_a_file_in_use_is_not_closed_to_make_room(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(b"x")
    files = OpenFiles(lambda path: os.open(path, os.O_RDONLY), os.close, capacity=1)
    with files.lease(paths[0]) as first:
        for path in paths[1:]:
            with files.lease(path):
                pass
        assert os.readlink(f"/proc/self/fd/{first}") == str(paths[0])
    files.close()


def test_a_file_forgotten_in_use_is_closed_after_that(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    files = OpenFiles(lambda path: os.open(path, os.O_RDONLY), os.close, capacity=8)
    with files.lease(path) as old:
        files.forget(path)
        path.unlink()
        path.write_bytes(b"new")
        with files.lease(path) as new:
            assert (os.pread(old, 3, 0), os.pread(new, 3, 0)) == (b"old", b"new")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(old)
    files.close()


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
