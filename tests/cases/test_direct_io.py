"""Direct I/O where it does not work, or works differently than on the disk at hand."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.loops import loop_mount, memory_mount
from tests.support.tiering_stores import (
    RECORDS,
    assert_state,
    content,
    fill,
    make_store,
    small_chunks,
)
from tiering.arena import Arena
from tiering.backends.posix import PosixBackend
from tiering.backends.probe import open_unnamed, probe, reported_alignment
from tiering.checksum import ChunkCrc, Table
from tiering.pool import Pool
from tiering.records import Record, Tier
from tiering.store import open_reader, open_writer
from tiering.testing import aligned_buffer, unaligned_buffer, wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A kind of drive, and how it has to be used; no ``reason`` means directly."""

    lend: Callable[[Path], AbstractContextManager[Path]]
    filesystem: str
    alignment: int = 1
    reason: str = ""


def _loop(**arguments: object) -> Callable[[Path], AbstractContextManager[Path]]:
    @contextmanager
    def lend(folder: Path) -> Iterator[Path]:
        with loop_mount(folder, **arguments) as mount:  # type: ignore[arg-type]
            yield mount.point

    return lend


def _memory(filesystem: str) -> Callable[[Path], AbstractContextManager[Path]]:
    return lambda folder: memory_mount(folder, filesystem)


PLACES = {
    "ext4, sectors of 512": Place(lend=_loop(), filesystem="ext4", alignment=512),
    "ext4, sectors of 4096": Place(
        lend=_loop(sector_nbytes=4096), filesystem="ext4", alignment=4096
    ),
    "xfs, sectors of 512": Place(lend=_loop(filesystem="xfs"), filesystem="xfs", alignment=512),
    "xfs, sectors of 4096": Place(
        lend=_loop(filesystem="xfs", sector_nbytes=4096), filesystem="xfs", alignment=4096
    ),
    "sectors larger than a page": Place(
        lend=_loop(filesystem="xfs", sector_nbytes=8192),
        filesystem="xfs",
        reason="it needs 8192 B alignment, shards have 4096",
    ),
    "data goes through the journal": Place(
        lend=_loop(options="data=journal"), filesystem="ext4", reason="statx: not for this file"
    ),
    "tmpfs": Place(
        lend=_memory("tmpfs"), filesystem="tmpfs", reason="a tmpfs is RAM, and counts as RAM"
    ),
    "ramfs": Place(
        lend=_memory("ramfs"), filesystem="ramfs", reason="a ramfs is RAM, and counts as RAM"
    ),
}


@pytest.fixture(name="place", params=PLACES)
def _place(request: pytest.FixtureRequest) -> Place:
    return PLACES[request.param]


@pytest.fixture(name="drive")
def _drive(place: Place, tmp_path: Path) -> Iterator[Path]:
    with place.lend(tmp_path) as point:
        yield point


@pytest.mark.root
def test_a_run_goes_through_on_any_drive_and_says_once_how_it_is_used(
    place: Place, drive: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_chunks(), caplog.at_level(logging.WARNING):
        store = make_store(tmp_path / "store", seed=1, drives=[drive])
        _train(store, steps=3)
        with open_reader(store) as reader:
            assert_state(reader, 3)
            [access] = reader.access
    assert (access.direct, access.filesystem) == (not place.reason, place.filesystem)
    said = [record.getMessage() for record in caplog.records if "direct I/O" in record.getMessage()]
    assert len(said) == bool(place.reason)
    for line in said:
        assert str(drive) in line
        assert f"({place.filesystem})" in line
        assert place.reason in line


def _train(store: Path, steps: int) -> None:
    """Take the store from its first state to the state ``steps``, as a run does."""
    moving = [record for record in RECORDS if not record.shared]
    with open_writer(store) as writer, Arena(1 << 20) as arena:
        writer.reserve()
        pool = Pool(writer, {"tiny": Tier.PINNED}, {Tier.PINNED: arena})
        pool.load()
        for step in range(2, steps + 1):
            pool.begin_step()
            tables = {record.name: _update(pool, record, step) for record in moving}
            pool.commit(step, {"seed": step}, tables)
        pool.close()


def _update(pool: Pool, record: Record, step: int) -> Table:
    """Read the record as the step before left it, and write it as this one does."""
    before, after = content(record, step - 1), content(record, step)
    resident = pool.resident(record.name)
    if resident is not None:
        assert bytes(resident[: record.nbytes]) == before.tobytes()
        resident[: record.nbytes] = after.tobytes()
        return pool.flush(record.name)
    found = np.empty(record.nbytes, np.uint8)
    pool.read(record.name, 0, memoryview(found))
    np.testing.assert_array_equal(found, before)
    pool.write(record.name, 0, memoryview(after))
    crc = ChunkCrc(record)
    crc.feed(0, memoryview(after))
    return crc.table()


@pytest.mark.root
@pytest.mark.parametrize("filesystem", ["tmpfs", "ramfs"])
def test_a_run_whose_drive_is_memory_counts_it_as_memory(tmp_path: Path, filesystem: str) -> None:
    from tests.support.runs import run_config, tiny_llama, token_rows, train

    model, data = tiny_llama(tmp_path / "model"), token_rows(tmp_path / "rows.jsonl")
    with memory_mount(tmp_path, filesystem) as memory:
        places = {"store__drives": [str(memory)], "memory__gradients": "disk"}
        config = run_config(model, data, tmp_path / "run", memory__resident=1, **places)
        seen = train(config)
        shards = [path.stat() for path in memory.rglob("*.*.*.*")]
    assert [row["step"] for row in seen.rows] == [1, 2, 3]
    assert seen.plan is not None
    assert seen.plan.footprint is not None
    index_nbytes = 4096 * len(shards)
    taken = sum(512 * status.st_blocks for status in shards) - index_nbytes
    assert 0 < taken <= seen.plan.footprint.stored


@pytest.mark.root
def test_the_larger_of_the_alignments_that_a_drive_asks_for_is_enough_everywhere(
    place: Place, drive: Path
) -> None:
    access = probe(drive)
    # Kernels before 6.1 do not say what they ask for; then 4096 it is.
    assert access.alignment in (place.alignment, 4096 if access.direct else 1)
    assert access.in_ram == (place.filesystem in ("tmpfs", "ramfs"))
    path, unit = drive / "file", access.alignment
    path.write_bytes(bytes(9 * unit))
    backend = PosixBackend("test", direct=access.direct, writable=True, alignment=access.alignment)
    data = unaligned_buffer(3 * unit, seed=1, start=unit)
    wait_for(backend.write(path, 5 * unit, data))
    out = unaligned_buffer(3 * unit, start=3 * unit)
    wait_for(backend.read(path, 5 * unit, out))
    backend.close()
    assert out == data
    assert path.read_bytes() == bytes(5 * unit) + bytes(data) + bytes(unit)


@pytest.mark.root
def test_half_a_sector_is_refused_before_the_kernel_sees_it(tmp_path: Path) -> None:
    with loop_mount(tmp_path, sector_nbytes=4096) as mount:
        fd = open_unnamed(mount.point, os.O_DIRECT)
        try:
            assert reported_alignment(fd) == 4096
            with pytest.raises(OSError, match="Invalid argument"):
                os.pwritev(fd, [aligned_buffer(512)], 0)
        finally:
            os.close(fd)
        path = mount.point / "file"
        path.write_bytes(bytes(4096))
        access = probe(mount.point)
        backend = PosixBackend("test", direct=True, writable=True, alignment=access.alignment)
        with pytest.raises(ValueError, match="must be multiples of 4096"):
            backend.write(path, 0, aligned_buffer(512))
        backend.close()


@pytest.mark.root
def test_a_store_on_a_read_only_drive_is_read_directly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with loop_mount(tmp_path) as mount, small_chunks():
        store = make_store(tmp_path / "store", seed=1, drives=[mount.point])
        subprocess.run(["mount", "-o", "remount,ro", str(mount.point)], check=True)
        caplog.clear()
        with caplog.at_level(logging.WARNING), open_reader(store) as reader:
            assert_state(reader, 1)
            assert reader.access[0].direct
        assert not caplog.records


@pytest.mark.root
def test_an_overlay_is_tried_and_not_believed(tmp_path: Path) -> None:
    """One on a ramfs takes no direct I/O, one on an ext4 does; its own type says neither."""
    with memory_mount(tmp_path, "ramfs") as memory, loop_mount(tmp_path) as disk:
        for base, direct in ((memory, False), (disk.point, True)):
            with _overlay(base) as drive, small_chunks():
                assert probe(drive).direct == direct
                store = make_store(drive / "store", seed=1)
                with open_writer(store) as writer:
                    fill(writer, 2)
                with open_reader(store) as reader:
                    assert_state(reader, 2)


@contextmanager
def _overlay(base: Path) -> Iterator[Path]:
    parts = {name: base / name for name in ("lower", "upper", "work", "merged")}
    for path in parts.values():
        path.mkdir()
    options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**parts)
    command = ["mount", "-t", "overlay", "none", str(parts["merged"]), "-o", options]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no overlay here")
    try:
        yield parts["merged"]
    finally:
        subprocess.run(["umount", "--lazy", str(parts["merged"])], check=True)


WITHOUT_ROOT = """
import logging, subprocess, sys
from pathlib import Path
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="said: %(message)s")
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", sys.argv[2], "none", folder], check=True)
from tests.support.tiering_stores import assert_state, fill, make_store, small_chunks
from tiering.store import open_reader, open_writer
with small_chunks():
    store = make_store(folder / "store", seed=1)
    with open_writer(store) as writer:
        print("in ram:", writer.access[0].in_ram)
        fill(writer, 2)
    with open_reader(store) as reader:
        assert_state(reader, 2)
print("trained")
"""


@pytest.mark.parametrize("filesystem", ["ramfs", "tmpfs"])
def test_memory_mounted_by_an_ordinary_user_is_known_as_memory(
    tmp_path: Path, filesystem: str
) -> None:
    command = ["unshare", "-Urm", sys.executable, "-c", WITHOUT_ROOT, str(tmp_path), filesystem]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"]).returncode:
        pytest.skip("no mounts of one's own here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "in ram: True" in done.stdout
    assert "trained" in done.stdout
    said = [line for line in done.stdout.splitlines() if line.startswith("said:")]
    assert all(str(tmp_path) in line and f"({filesystem})" in line for line in said)
    assert said
