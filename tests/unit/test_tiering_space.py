from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiering_stores import assert_state, make_store, small_chunks
from tiering import fsops, records
from tiering.errors import CapacityError, StorageError
from tiering.records import Record
from tiering.scratch import Scratch
from tiering.store import create_store, open_reader, open_writer
from tiering.testing import aligned_buffer


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Iterator[Path]:
    with small_chunks():
        yield make_store(tmp_path / "store")


def _allocated(store: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in (store / "shards").iterdir())


def test_reserving_takes_the_blocks_and_changes_no_byte(store: Path) -> None:
    lengths = {p.name: p.stat().st_size for p in (store / "shards").iterdir()}
    before = _allocated(store)
    with open_writer(store) as writer:
        writer.reserve()
        writer.reserve()
    with open_reader(store) as reader:
        assert_state(reader, 1)
        valid = sum(r.padded_nbytes for r in reader.records.values() if not r.shared)
    assert {p.name: p.stat().st_size for p in (store / "shards").iterdir()} == lengths
    assert before < valid + (512 << 10)
    assert _allocated(store) >= 2 * valid


def test_a_drive_that_is_too_small_is_refused_before_anything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "CHUNK_LENGTH", 1 << 36)
    record = Record(name="huge", dtype="float32", length=1 << 40, shard_nbytes=1 << 40)
    with create_store(tmp_path / "s", records=[record], schema_files={}) as writer:
        table = np.zeros(record.geometry.chunk_count, np.uint32)
        writer.commit(step=0, train_state={}, checksums={"huge": table})
        before = _allocated(tmp_path / "s")
        with pytest.raises(CapacityError) as caught:
            writer.reserve()
    assert _allocated(tmp_path / "s") == before
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("drive 0 full")
    assert lines[1].split() == ["drive", "need", "B", "free", "B", "folder"]
    assert int(lines[2].split()[1]) == 1 << 42


def test_a_drive_that_fills_up_meanwhile_is_refused_with_the_table(store: Path) -> None:
    calls = 0

    def full(action: str, _path: Path) -> None:
        nonlocal calls
        calls += action == "reserve"
        if calls == 3:
            raise OSError(errno.ENOSPC, "injected")

    with open_writer(store) as writer, fsops.observed(full):
        with pytest.raises(CapacityError, match="No space left on device") as found:
            writer.reserve()
        assert "need B" in str(found.value)
    with open_reader(store) as reader:
        assert_state(reader, 1)


def test_reserving_that_fails_leaves_the_length_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_grown(fd: int, offset: int, nbytes: int) -> None:
        """What ext4 does when it runs out of space."""
        os.ftruncate(fd, offset + nbytes)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    monkeypatch.setattr(os, "posix_fallocate", fail_grown)
    with pytest.raises(StorageError, match=r"cannot reserve .*moved 0 of .*No space left"):
        fsops.reserve(path, 1 << 20)
    assert path.read_bytes() == b"x" * 10


def test_scratch_keeps_bytes_apart_counts_them_and_leaves_no_name(store: Path) -> None:
    with open_writer(store) as writer, Scratch(writer, {"a": 5000, "b": 4096}) as scratch:
        data = aligned_buffer(8192, seed=1)
        scratch.write("a", 0, data)
        scratch.write("b", 0, data[4096:])
        out = aligned_buffer(8192)
        scratch.read("a", 0, out)
        assert out == data
        scratch.read("b", 0, out[:4096])
        assert out[:4096] == data[4096:]
        assert (scratch.written_bytes, scratch.read_bytes) == (12288, 12288)
        with pytest.raises(ValueError, match="scratch b: 8192 B at 0 reach past its 4096 B"):
            scratch.write("b", 0, data)
        names = {path.name for path in (store / "shards").iterdir()}
    assert all(name == "drive.json" or name[:2] in ("0.", "1.", "sh") for name in names)


def test_scratch_that_does_not_fit_is_refused(store: Path) -> None:
    with open_writer(store) as writer:
        with pytest.raises(CapacityError, match=r"scratch grads needs .* B free"):
            Scratch(writer, {"small": 1, "grads": 1 << 50})
        Scratch(writer, {"small": 1}).close()
