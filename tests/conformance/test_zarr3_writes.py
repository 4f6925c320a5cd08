from __future__ import annotations

import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiering_crash import killed_everywhere
from tests.support.zarr_arrays import packed_shard
from tiering import fsops
from tiering.backends.zarr3 import Zarr3Backend
from tiering.codecs import Codec, ShardSpec, empty_shard
from tiering.errors import CorruptionError, StorageError
from tiering.testing import file_size_limit, wait_for

CHUNK_NBYTES = 1000

codecs = pytest.mark.parametrize("codec", list(Codec))


def spec_of(
    codec: Codec = Codec.ZSTD, chunk_nbytes: int = CHUNK_NBYTES, chunks: int = 4
) -> ShardSpec:
    return ShardSpec(
        array="some.array",
        shard=0,
        codec=codec,
        itemsize=2,
        chunk_nbytes=chunk_nbytes,
        chunks=chunks,
        slots=chunks,
    )


def content(spec: ShardSpec, seed: int) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(spec.nbytes))


BEFORE, AFTER = content(spec_of(), 1), content(spec_of(), 2)


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    path = tmp_path / "0.some.array.0"
    path.write_bytes(packed_shard(spec_of(), BEFORE))
    return path


@pytest.fixture(name="backend")
def _backend(path: Path) -> Iterator[Zarr3Backend]:
    backend = Zarr3Backend("test", writable=True)
    backend.describe(path, spec_of())
    yield backend
    backend.close()


def read(backend: Zarr3Backend, path: Path) -> bytes:
    out = bytearray(backend.nbytes(path))
    wait_for(backend.read(path, 0, memoryview(out)))
    return bytes(out)


def read_anew(path: Path) -> bytes:
    backend = Zarr3Backend("another", writable=False)
    backend.describe(path, spec_of())
    try:
        return read(backend, path)
    finally:
        backend.close()


@pytest.mark.parametrize("piece", [1, 7, 999, 1000, 1001, 2500, 4000])
@codecs
def test_pieces_of_any_size_make_the_same_file(tmp_path: Path, codec: Codec, piece: int) -> None:
    spec, path = spec_of(codec), tmp_path / "shard"
    path.write_bytes(empty_shard(spec))
    backend = Zarr3Backend("test", writable=True)
    backend.describe(path, spec)
    futures = [
        backend.write(path, at, AFTER[at : at + piece]) for at in range(0, spec.nbytes, piece)
    ]
    assert sum(map(wait_for, futures)) == spec.nbytes
    assert read(backend, path) == AFTER
    backend.close()
    assert path.read_bytes() == packed_shard(spec, AFTER)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("piece", [1, 3, 333, 1000, 1001, 1999])
@codecs
def test_every_range_is_read(tmp_path: Path, codec: Codec, piece: int) -> None:
    spec, path = spec_of(codec), tmp_path / "shard"
    path.write_bytes(packed_shard(spec, AFTER))
    backend = Zarr3Backend("test", writable=False)
    backend.describe(path, spec)
    for at in {0, 1, 999, 1000, 1001, 2000, spec.nbytes - piece}:
        out = bytearray(piece)
        assert wait_for(backend.read(path, at, memoryview(out))) == piece
        assert out == AFTER[at : at + piece]
    backend.close()


@pytest.mark.parametrize("offset", [1, 999, 1001, 1500, 3999])
def test_a_write_that_continues_nothing_is_refused(
    backend: Zarr3Backend, path: Path, offset: int
) -> None:
    wait_for(backend.write(path, 0, AFTER[:1000]))
    with pytest.raises(ValueError, match="in order, and the last write ended at 1000"):
        backend.write(path, offset, AFTER[:1])
    wait_for(backend.write(path, 1000, AFTER[1000:]))  # the refusal cost nothing
    assert read(backend, path) == AFTER


def test_a_write_beyond_the_end_is_refused(backend: Zarr3Backend, path: Path) -> None:
    wait_for(backend.write(path, 0, AFTER[:3999]))
    with pytest.raises(ValueError, match="2 B at offset 3999 of 4000 B"):
        backend.write(path, 3999, AFTER[:2])
    with pytest.raises(ValueError, match="4001 B at offset 0 of 4000 B"):
        backend.write(path, 0, memoryview(bytes(4001)))
    assert read(backend, path) == BEFORE


def test_a_file_that_was_not_described_is_refused(backend: Zarr3Backend, path: Path) -> None:
    other = path.with_name("other")
    for use in (
        lambda: backend.read(other, 0, memoryview(bytearray(1))),
        lambda: backend.write(other, 0, AFTER[:1]),
        lambda: backend.nbytes(other),
    ):
        with pytest.raises(ValueError, match="was not described to test"):
            use()


def test_what_a_file_is_does_not_change_while_it_is_written(
    backend: Zarr3Backend, path: Path
) -> None:
    wait_for(backend.write(path, 0, AFTER[:1500]))
    backend.describe(path, spec_of())
    with pytest.raises(ValueError, match="is being written"):
        backend.describe(path, spec_of(Codec.NONE))
    wait_for(backend.write(path, 1500, AFTER[1500:]))
    assert read(backend, path) == AFTER


def test_a_write_at_the_start_begins_anew(backend: Zarr3Backend, path: Path) -> None:
    wait_for(backend.write(path, 0, BEFORE[:2500]))
    wait_for(backend.write(path, 0, AFTER[:1500]))
    wait_for(backend.write(path, 1500, AFTER[1500:]))
    assert read(backend, path) == AFTER
    wait_for(backend.write(path, 0, BEFORE))
    assert read(backend, path) == BEFORE
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("end", ["close", "forget"])
def test_what_is_unfinished_never_shows_and_is_removed(
    backend: Zarr3Backend, path: Path, end: str
) -> None:
    file = path.read_bytes()
    for stop in (1000, 2500, 3999):
        wait_for(backend.write(path, 0, AFTER[:stop]))
        assert path.read_bytes() == file
        assert read(backend, path) == BEFORE
    if end == "close":
        backend.close()
    else:
        backend.forget(path)
        with pytest.raises(ValueError, match="the last write ended at 0"):
            backend.write(path, 3999, AFTER[3999:])
    assert path.read_bytes() == file
    assert list(path.parent.iterdir()) == [path]


def test_forgetting_returns_when_what_is_unfinished_is_gone(
    backend: Zarr3Backend, path: Path
) -> None:
    removed = []

    def remove_late(action: str, _path: Path) -> None:
        if action == "remove":
            time.sleep(0.2)
            removed.append(True)

    with fsops.observed(remove_late):
        wait_for(backend.write(path, 0, AFTER[:1500]))
        backend.forget(path)
        assert removed
    assert list(path.parent.iterdir()) == [path]


def test_forgetting_a_file_that_was_removed_and_one_unknown_does_nothing(
    backend: Zarr3Backend, path: Path
) -> None:
    wait_for(backend.write(path, 0, AFTER[:1500]))
    backend.forget(path)
    path.unlink()
    backend.forget(path)
    backend.forget(path.with_name("unknown"))
    with pytest.raises(StorageError, match="No such file"):
        wait_for(backend.write(path, 0, AFTER))
    assert list(path.parent.iterdir()) == []


def test_the_file_behind_a_link_is_replaced_where_it_lies(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "links" / "0"
    link.parent.mkdir()
    link.symlink_to(path)
    backend = Zarr3Backend("test", writable=True)
    backend.describe(link, spec_of())
    wait_for(backend.write(link, 0, AFTER))
    assert read(backend, link) == AFTER
    backend.close()
    assert link.readlink() == path
    assert read_anew(path) == AFTER


def test_a_reader_does_not_write(path: Path) -> None:
    backend = Zarr3Backend("test", writable=False)
    backend.describe(path, spec_of())
    with pytest.raises(StorageError, match="test was opened for reading"):
        wait_for(backend.write(path, 0, AFTER))
    backend.close()
    assert read_anew(path) == BEFORE


def test_a_failed_write_leaves_the_old_file_and_what_continues_it_fails(
    backend: Zarr3Backend, path: Path
) -> None:
    file = path.read_bytes()
    with file_size_limit(1200):
        first = backend.write(path, 0, AFTER[:500])
        second = backend.write(path, 500, AFTER[500:2800])
        third = backend.write(path, 2800, AFTER[2800:])
        assert wait_for(first) == 500
        with pytest.raises(StorageError, match=r"too large.*shard 0 of array") as caught:
            wait_for(second)
    assert (caught.value.offset, caught.value.wanted, caught.value.moved) == (1000, 2300, 500)
    with pytest.raises(StorageError, match=r"after a failed piece of .* too large") as caught:
        wait_for(third)
    assert (caught.value.offset, caught.value.wanted, caught.value.moved) == (2800, 1200, 0)
    assert path.read_bytes() == file
    assert list(path.parent.iterdir()) == [path]
    wait_for(backend.write(path, 0, AFTER))
    assert read(backend, path) == AFTER


def test_every_step_in_the_threads_is_seen_by_the_observer_of_the_caller(
    backend: Zarr3Backend, path: Path
) -> None:
    steps: list[tuple[str, str]] = []
    with fsops.observed(lambda action, path: steps.append((action, path.name))):
        future = backend.write(path, 0, AFTER)
    wait_for(future)
    unfinished = path.name + fsops.UNFINISHED
    writes = [("write", unfinished)] * 5  # four chunks and the index
    assert [step for step in steps if step[0] != "close"] == [
        ("remove", unfinished),
        ("create", unfinished),
        *writes,
        ("rename", path.name),
    ]


@pytest.mark.parametrize("action", ["create", "write", "close", "rename"])
def test_a_step_that_fails_leaves_the_old_file_and_nothing_else(
    backend: Zarr3Backend, path: Path, action: str
) -> None:
    def fail(step: str, _: Path) -> None:
        if step == action:
            raise OSError(5, "gone")

    with fsops.observed(fail), pytest.raises(StorageError, match=f"cannot {action} .*some.array"):
        wait_for(backend.write(path, 0, AFTER))
    assert read(backend, path) == BEFORE
    assert list(path.parent.iterdir()) == [path]
    wait_for(backend.write(path, 0, AFTER))
    assert read(backend, path) == AFTER


def test_a_kill_leaves_the_old_or_the_new_shard(path: Path) -> None:
    def action() -> None:
        backend = Zarr3Backend("test", writable=True)
        backend.describe(path, spec_of())
        for at in range(0, 4000, 800):
            wait_for(backend.write(path, at, AFTER[at : at + 800]))
        backend.close()

    found = []
    for _ in killed_everywhere(action):
        found.append(read_anew(path))
    assert set(found) == {bytes(BEFORE), bytes(AFTER)}
    assert found == sorted(found, key=lambda data: data == AFTER)
    assert list(path.parent.iterdir()) == [path]  # what the killed ones left was taken over


def test_readers_see_whole_chunks_of_the_old_or_the_new_while_a_file_is_replaced(
    backend: Zarr3Backend, path: Path
) -> None:
    versions = [BEFORE, AFTER]
    done = threading.Event()

    def write_on() -> None:
        try:
            for i in range(40):
                for at in range(0, 4000, 1600):
                    wait_for(backend.write(path, at, versions[i % 2][at : at + 1600]))
        finally:
            done.set()

    def read_on(seed: int) -> int:
        random, count = np.random.default_rng(seed), 0
        while not (count and done.is_set()):
            chunk, length = int(random.integers(4)), int(random.integers(1, 1001))
            at = 1000 * chunk + int(random.integers(1001 - length))
            out = bytearray(length)
            wait_for(backend.read(path, at, memoryview(out)))
            assert out in [version[at : at + length] for version in versions]
            count += 1
        return count

    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(read_on, seed) for seed in range(3)]
        threads.submit(write_on).result()
        assert all(reader.result() for reader in readers)
    assert read(backend, path) == AFTER


def test_files_are_written_side_by_side_and_each_in_order(tmp_path: Path) -> None:
    spec, count = spec_of(Codec.BLOSC_LZ4_BITSHUFFLE), 6
    paths = [tmp_path / str(i) for i in range(count)]
    backend = Zarr3Backend("test", writable=True)
    for path in paths:
        path.write_bytes(empty_shard(spec))
        backend.describe(path, spec)
    data = [content(spec, seed) for seed in range(count)]
    futures = [
        backend.write(path, at, data[i][at : at + 130])
        for at in range(0, spec.nbytes, 130)
        for i, path in enumerate(paths)
    ]
    backend.close()
    assert sum(map(wait_for, futures)) == count * spec.nbytes
    assert [path.read_bytes() for path in paths] == [packed_shard(spec, d) for d in data]


@pytest.fixture(name="transfers")
def _transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the offsets of what is read from files, as it happens."""
    offsets: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return offsets


def test_the_index_is_read_once_and_a_chunk_read_in_parts_is_decoded_once(
    backend: Zarr3Backend, path: Path, transfers: list[int]
) -> None:
    for at in range(0, 4000, 100):
        wait_for(backend.read(path, at, memoryview(bytearray(100))))
    assert len(transfers) == 1 + 4
    backend.forget(path)
    wait_for(backend.read(path, 0, memoryview(bytearray(100))))
    assert len(transfers) == 1 + 4 + 2


def test_many_who_want_parts_of_one_chunk_wait_for_one_decoding(
    path: Path, transfers: list[int]
) -> None:
    backend = Zarr3Backend("test", writable=False, threads=8)
    backend.describe(path, spec_of())
    outs = [bytearray(100) for _ in range(10)]
    reads = [backend.read(path, 100 * i, memoryview(out)) for i, out in enumerate(outs)]
    assert sum(map(wait_for, reads)) == 1000
    backend.close()
    assert b"".join(outs) == BEFORE[:1000]
    assert len(transfers) == 2


def test_open_files_stay_bounded_and_none_is_left(tmp_path: Path) -> None:
    spec = spec_of()
    before = set(os.listdir("/proc/self/fd"))
    backend = Zarr3Backend("test", writable=True, open_files=1)
    for i in range(20):
        path = tmp_path / str(i)
        path.write_bytes(packed_shard(spec, BEFORE) if i % 3 else b"no shard")
        backend.describe(path, spec)
        if i % 3:
            assert read(backend, path) == BEFORE
        else:
            with pytest.raises(CorruptionError):
                read(backend, path)
        wait_for(backend.write(path, 0, AFTER if i % 2 else AFTER[:1500]))
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1 + 10  # ten are unfinished
    backend.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_threads_carry_the_name_of_the_backend_and_end_with_it(path: Path) -> None:
    backend = Zarr3Backend("drive7", writable=False, threads=2)
    backend.describe(path, spec_of())
    assert read(backend, path) == BEFORE

    def names() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name.startswith("zarr-drive7")}

    assert 1 <= len(names()) <= 2
    backend.close()
    assert not names()


MIB = 1 << 20


def _peak(action: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@codecs
def test_memory_is_a_few_chunks_however_large_the_shard(tmp_path: Path, codec: Codec) -> None:
    spec = spec_of(codec, chunk_nbytes=MIB // 4, chunks=40)
    path, data, out = tmp_path / "shard", content(spec, 1), memoryview(bytearray(spec.nbytes))
    path.write_bytes(empty_shard(spec))
    backend = Zarr3Backend("test", writable=True, threads=2)
    backend.describe(path, spec)
    piece = 100_001

    def write() -> None:
        for at in range(0, spec.nbytes, piece):
            wait_for(backend.write(path, at, data[at : at + piece]))

    def read() -> None:
        for at in range(0, spec.nbytes, piece):
            wait_for(backend.read(path, at, out[at : at + piece]))
        wait_for(backend.read(path, 0, out))

    write_peak, read_peak = _peak(write), _peak(read)
    backend.close()
    assert out == data
    # Decoded, encoded at its largest, encoded; each reading thread one encoded and one decoded;
    # and one more for everything that is not a chunk.
    assert write_peak < (3 + 1) * spec.max_encoded_nbytes
    assert read_peak < (2 * 2 + 1) * spec.max_encoded_nbytes
