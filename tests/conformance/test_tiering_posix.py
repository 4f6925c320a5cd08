from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.faults import FaultConformance
from tests.support.tiering_stores import memory_folder
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


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_short_transfers_go_on_at_a_block_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, size = tmp_path / "file", 5 * ALIGNMENT
    data, out = aligned_buffer(size, seed=1), aligned_buffer(size)
    path.write_bytes(data if name == "preadv" else bytes(size))
    direct = probe(tmp_path).direct
    original, offsets = getattr(os, name), []

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return min(original(fd, buffers, offset), ALIGNMENT + 1000)

    monkeypatch.setattr(os, name, short)
    backend = PosixBackend("test", direct=direct, writable=True)
    submit = backend.read if name == "preadv" else backend.write
    moved = submit(path, 0, out if name == "preadv" else data).result()
    backend.close()
    assert moved == size
    assert offsets == [0, 4096, 8192, 12288, 16384]
    assert (out if name == "preadv" else path.read_bytes()) == data


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(ALIGNMENT))
    backend = PosixBackend("test", direct=False, writable=False)
    with pytest.raises(StorageError, match="cannot write"):
        backend.write(path, 0, aligned_buffer(ALIGNMENT)).result()
    backend.close()
    assert path.read_bytes() == bytes(ALIGNMENT)


def test_memory_is_no_drive_and_says_so() -> None:
    with memory_folder() as folder:
        access = probe(folder)
    if access.filesystem == "tmpfs":
        assert not access.direct
        assert "counts as memory" in access.reason


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    probe(tmp_path)
    assert list(tmp_path.iterdir()) == []
