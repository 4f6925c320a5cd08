"""The suite over the real kvikio, and what the suite cannot ask."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.faults import Fault, FaultConformance, Other, build_shim, run_with_faults
from tests.support.libcuda import require_kvikio
from tests.support.loops import MIB, loop_mount
from tiering.backends.posix import PosixBackend
from tiering.backends.probe import probe
from tiering.errors import StorageError
from tiering.recordio import RecordFiles
from tiering.records import ALIGNMENT, Record
from tiering.slots import Shard
from tiering.testing import (
    LENGTHS,
    BackendConformance,
    aligned_buffer,
    file_size_limit,
    no_encoded_shards,
    unaligned_buffer,
    wait_for,
)

if TYPE_CHECKING:
    from tiering.backends.kvikio import KvikioBackend


def make_kvikio(folder: Path, *, writable: bool = True, open_files: int = 64) -> KvikioBackend:
    require_kvikio()
    access = probe(folder)
    if not access.direct:
        pytest.skip(f"{folder}: no direct I/O: {access.reason}")
    from tiering.backends.kvikio import KvikioBackend

    return KvikioBackend("test", writable=writable, open_files=open_files)


class TestKvikio(FaultConformance):
    def make_backend(self, folder: Path) -> KvikioBackend:
        return make_kvikio(folder)

    # No multiple of a sector: a direct write that ends inside one does not exist, and kvikio
    # believes that it wrote what it is told.
    @pytest.mark.parametrize("moves", [512, 4096])
    def test_short_writes_go_on_where_they_ended(
        self, folder: Path, other: Other, moves: int
    ) -> None:
        super().test_short_writes_go_on_where_they_ended(folder, other, moves)

    # How far kvikio came before a failure, it does not say; what it left is tried again.
    @pytest.mark.parametrize(
        ("op", "code"), [("write", errno.ENOSPC), ("write", errno.EIO), ("read", errno.EIO)]
    )
    def test_an_error_after_a_short_transfer_tells_how_far_it_came(
        self, folder: Path, other: Other, op: str, code: int
    ) -> None:
        path = self.make_file(folder, bytes(9 * ALIGNMENT), "victim")
        failed = Fault(op=op, path="victim", count=1, errno=code)
        short = Fault(op=op, path="victim", after=1, count=1, moves=2 * ALIGNMENT)
        again = Fault(op=op, path="victim", after=2, errno=code)
        outcome = other.transfer(path, op, ALIGNMENT, 8 * ALIGNMENT, failed, short, again)
        assert outcome == {
            "errno": code,
            "path": str(path),
            "offset": 3 * ALIGNMENT,
            "wanted": 8 * ALIGNMENT,
            "moved": 2 * ALIGNMENT,
        }

    # Reads only: kvikio makes a write that moves nothing again for ever. No file system has one.
    @pytest.mark.parametrize("op", ["read"])
    def test_transfers_that_move_nothing_end_with_an_error(
        self, folder: Path, other: Other, op: str
    ) -> None:
        super().test_transfers_that_move_nothing_end_with_an_error(folder, other, op)


class TestFewFiles(BackendConformance):
    def make_backend(self, folder: Path) -> KvikioBackend:
        return make_kvikio(folder, open_files=4)


def test_open_files_stay_bounded(tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(20)]
    for path in paths:
        path.write_bytes(bytes(ALIGNMENT))
    backend = make_kvikio(tmp_path, open_files=8)
    before = len(os.listdir("/proc/self/fd"))
    for path in paths * 2:
        wait_for(backend.read(path, 0, aligned_buffer(ALIGNMENT)))
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    backend.close()


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_what_one_engine_writes_the_other_reads(tmp_path: Path, nbytes: int) -> None:
    record = Record(name="r", dtype="uint8", length=nbytes)
    whole = record.geometry.chunk_count * record.geometry.chunk_nbytes
    written = []
    for kvikio_writes in (True, False):
        path = tmp_path / f"shard-{kvikio_writes}"
        path.write_bytes(bytes(whole))
        pair = [make_kvikio(tmp_path), PosixBackend("test", direct=True, writable=True)]
        writer, reader = pair if kvikio_writes else reversed(pair)
        data = unaligned_buffer(nbytes, seed=nbytes, start=3)
        for backend, move in ((writer, RecordFiles.write), (reader, RecordFiles.read)):
            files = RecordFiles([backend].__getitem__, no_encoded_shards)
            files.attach(0, {"r": record}, {"r": (Shard(drive=0, path=path),)})
            buffer = data if backend is writer else unaligned_buffer(nbytes, start=5)
            move(files, 0, "r", 0, buffer)
            assert buffer == data
        for backend in pair:
            backend.close()
        written.append(path.read_bytes())
    assert written[0] == written[1] == bytes(data) + bytes(whole - nbytes)


def test_a_buffer_that_its_owner_let_go_of_is_written_all_the_same(tmp_path: Path) -> None:
    count, nbytes = 8, 4 * MIB
    paths = [tmp_path / str(i) for i in range(count)]
    for path in paths:
        path.write_bytes(bytes(nbytes))
    backend = make_kvikio(tmp_path)
    futures = [backend.write(p, 0, aligned_buffer(nbytes, seed=i)) for i, p in enumerate(paths)]
    gc.collect()
    backend.forget(paths[0])
    backend.close()
    del backend
    assert [wait_for(future) for future in futures] == [nbytes] * count
    for i, path in enumerate(paths):
        assert path.read_bytes() == aligned_buffer(nbytes, seed=i)


def test_what_it_moves_passes_the_page_cache_by(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "file", 3 * MIB
    path.write_bytes(bytes(nbytes))
    backend = make_kvikio(tmp_path)
    import kvikio

    wait_for(backend.write(path, 0, aligned_buffer(nbytes, seed=1)))
    wait_for(backend.read(path, 0, aligned_buffer(nbytes)))
    backend.close()
    assert kvikio.get_page_cache_info(path) == (0, nbytes // ALIGNMENT)


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(ALIGNMENT))
    backend = make_kvikio(tmp_path, writable=False)
    with pytest.raises(StorageError, match="cannot write") as caught:
        wait_for(backend.write(path, 0, aligned_buffer(ALIGNMENT, seed=1)))
    backend.close()
    assert caught.value.errno == errno.EBADF
    assert path.read_bytes() == bytes(ALIGNMENT)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    backend = make_kvikio(tmp_path)
    with pytest.raises(StorageError) as caught:
        wait_for(backend.read(tmp_path, 0, aligned_buffer(ALIGNMENT)))
    backend.close()
    assert (caught.value.errno, caught.value.path) == (errno.EISDIR, tmp_path)


@pytest.mark.root
def test_a_full_drive_is_an_error_that_counts(tmp_path: Path) -> None:
    nbytes = 24 * MIB
    with loop_mount(tmp_path, nbytes=16 * MIB) as mount:
        path = mount.point / "file"
        with path.open("wb") as file:
            file.truncate(nbytes)
        backend = make_kvikio(mount.point)
        data = aligned_buffer(nbytes - ALIGNMENT, seed=1)
        with pytest.raises(StorageError, match="No space left") as caught:
            wait_for(backend.write(path, ALIGNMENT, data))
        backend.close()
        error = caught.value
        assert (error.errno, error.path, error.wanted) == (errno.ENOSPC, path, len(data))
        assert 0 <= error.moved < len(data)  # pieces are written side by side
        assert error.offset == ALIGNMENT + error.moved
        with path.open("rb") as file:
            file.seek(ALIGNMENT)
            assert file.read(error.moved) == data[: error.moved]


@pytest.mark.root
def test_a_drive_that_cannot_be_read_is_an_error_that_counts(tmp_path: Path) -> None:
    with loop_mount(tmp_path, nbytes=16 * MIB) as mount:
        path, data = mount.point / "file", aligned_buffer(8 * MIB, seed=1)
        path.write_bytes(data)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.truncate(mount.image, 4 * MIB)
        backend = make_kvikio(mount.point)
        out = aligned_buffer(len(data))
        with pytest.raises(StorageError, match="Input/output error") as caught:
            wait_for(backend.read(path, 0, out))
        backend.close()
        os.truncate(mount.image, 16 * MIB)
    error = caught.value
    assert (error.errno, error.path, error.wanted) == (errno.EIO, path, len(data))
    assert error.offset == error.moved < len(data)
    assert out[: error.moved] == data[: error.moved]


def test_what_moves_without_kvikio_is_told(tmp_path: Path) -> None:
    make_kvikio(tmp_path).close()
    path = tmp_path / "victim"
    path.write_bytes(aligned_buffer(ALIGNMENT, seed=1))
    code = f"""
        from pathlib import Path
        from tests.conformance.test_kvikio import aligned_buffer, make_kvikio
        backend = make_kvikio(Path({str(tmp_path)!r}))
        out = aligned_buffer({ALIGNMENT})
        assert backend.read(Path({str(path)!r}), 0, out).result() == {ALIGNMENT}
        assert out == aligned_buffer({ALIGNMENT}, seed=1)
    """
    fault = Fault(op="read", path="victim", count=1, errno=errno.EIO)
    done = run_with_faults(["-c", textwrap.dedent(code)], shim=build_shim(tmp_path), faults=[fault])
    assert done.returncode == 0, done.stderr
    assert f"{path}: 4096 B at offset 0 moved without kvikio, which failed" in done.stderr


# -- buffers that say where their memory is ------------------------------------------------------


class Described:
    """Memory as a device's is handed over; where it is host memory, kvikio finds that out."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        return {**self.data.__array_interface__, "version": 3}


def test_a_described_buffer_moves_as_a_view_does(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "file", 9 * MIB
    path.write_bytes(bytes(nbytes))
    backend = make_kvikio(tmp_path)
    data, out = (np.zeros(nbytes // 2 + 8, np.uint16)[8:] for _ in range(2))
    data[:] = np.random.default_rng(1).integers(0, 1 << 16, len(data))
    assert wait_for(backend.write_device(path, 0, Described(data))) == nbytes
    assert wait_for(backend.read_device(path, 0, Described(out))) == nbytes
    backend.close()
    assert path.read_bytes() == data.tobytes() == out.tobytes()


def test_what_cannot_be_moved_for_a_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * ALIGNMENT))
    backend = make_kvikio(tmp_path)
    pages = np.zeros(2 * ALIGNMENT, np.uint8)
    for offset, buffer in ((1, pages), (0, pages[:-1])):
        for submit in (backend.read_device, backend.write_device):
            with pytest.raises(ValueError, match="multiples of 4096"):
                submit(path, offset, Described(buffer))
    pages.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        backend.read_device(path, 0, Described(pages))
    backend.close()


def test_errors_of_a_device_are_those_of_the_file(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "file", 10 * MIB
    path.write_bytes(bytes(5 * MIB + ALIGNMENT))
    backend = make_kvikio(tmp_path)
    pages = Described(np.zeros(nbytes, np.uint8))
    with pytest.raises(StorageError, match="ended early") as early:
        wait_for(backend.read_device(path, MIB, pages))
    with pytest.raises(StorageError, match="absent") as absent:
        wait_for(backend.write_device(tmp_path / "absent", 0, pages))
    limit = 7 * MIB
    with file_size_limit(limit), pytest.raises(StorageError, match="too large") as large:
        wait_for(backend.write_device(path, MIB, pages))
    backend.close()
    facts = [(e.value.errno, e.value.offset, e.value.wanted) for e in (early, large)]
    assert facts[0] == (0, 5 * MIB + ALIGNMENT, nbytes)
    assert facts[1] == (errno.EFBIG, limit, nbytes)
    assert early.value.moved == 4 * MIB + ALIGNMENT
    assert absent.value.errno == errno.ENOENT
    assert not (tmp_path / "absent").exists()


# -- the path that is taken ----------------------------------------------------------------------


def test_the_path_taken_says_how_and_why_and_how_often(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(ALIGNMENT))
    backend = make_kvikio(tmp_path)
    for _ in range(3):
        wait_for(backend.read(path, 0, aligned_buffer(ALIGNMENT)))
    said = backend.path_taken()
    backend.close()
    from tiering.backends.driver import find_driver

    if not find_driver().devices:
        assert "compatibility mode, through host memory: the driver sees no device" in said
    assert "so far 0 by cuFile, 3 not" in said


@pytest.mark.root
def test_without_a_device_nothing_waits_for_one(tmp_path: Path) -> None:
    """Where /run/udev exists, kvikio by itself asks cuFile for a device, and never returns."""
    make_kvikio(tmp_path).close()
    path = tmp_path / "file"
    path.write_bytes(bytes(ALIGNMENT))
    code = f"""
        from pathlib import Path
        from tests.conformance.test_kvikio import aligned_buffer, make_kvikio
        backend = make_kvikio(Path({str(tmp_path)!r}))
        print(backend.read(Path({str(path)!r}), 0, aligned_buffer({ALIGNMENT})).result())
    """
    script = 'mount -t tmpfs none /run && mkdir -p /run/udev && exec "$@"'
    python = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *python],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.stdout == f"{ALIGNMENT}\n", done.stderr
