from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiering_stores import (
    RECORDS,
    content,
    make_store,
    memory_folder,
    read_all,
    small_chunks,
)
from tiering.arena import Arena
from tiering.checksum import ChunkCrc, Table
from tiering.errors import CorruptionError, RefusedError
from tiering.pool import Pool
from tiering.records import Record, Tier
from tiering.store import open_reader, open_writer

MOVING = tuple(record for record in RECORDS if not record.shared)
PLACEMENTS: Mapping[str, Mapping[str, Tier]] = {
    "drives": {},
    "memory": {record.name: Tier.PINNED for record in RECORDS},
    "tiers": {"u0.master": Tier.CXL, "u0.weights": Tier.PINNED, "tiny": Tier.CXL},
    "mixed": {"u0.master": Tier.PINNED, "tiny": Tier.PINNED, "even": Tier.NVME},
}
PIECE = 2 * 4096


@pytest.fixture(name="store")
def _store() -> Iterator[Path]:
    with small_chunks(), memory_folder() as folder:
        yield make_store(folder / "store", seed=1)


def _train(
    store: Path, placement: Mapping[str, Tier], steps: int, commit_every: int
) -> tuple[int, int]:
    """Add the number of the step to every byte, as a trainer would; return the drives' traffic."""
    with (
        open_writer(store) as writer,
        Arena(1 << 20) as arena,
        Arena(1 << 20) as expander,
    ):
        pool = Pool(writer, placement, {Tier.PINNED: arena, Tier.CXL: expander})
        pool.load()
        piece = arena.take("piece", PIECE)
        for step in range(1, steps + 1):
            pool.begin_step()
            tables = {r.name: _update(pool, r, step, piece) for r in MOVING}
            if step % commit_every == 0:
                for record in MOVING:
                    if pool.resident(record.name) is not None:
                        tables[record.name] = pool.flush(record.name)
                pool.commit(step, {"seed": step}, tables)
        traffic = pool.traffic[Tier.NVME]
        pool.close()
        del piece
        return traffic.read_bytes, traffic.written_bytes


def _update(pool: Pool, record: Record, step: int, piece: memoryview) -> Table:
    crc = ChunkCrc(record)
    resident = pool.resident(record.name)
    for offset in range(0, record.padded_nbytes, PIECE):
        count = min(PIECE, record.padded_nbytes - offset)
        view = piece[:count] if resident is None else resident[offset : offset + count]
        if resident is None:
            pool.read(record.name, offset, view)
        valid = np.frombuffer(view, np.uint8)[: record.nbytes - offset]
        np.add(valid, np.uint8(step), out=valid)
        if resident is None:
            pool.write(record.name, offset, view)
        crc.feed(offset, view)
    return crc.table()


@pytest.mark.parametrize("commit_every", [1, 2, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement_and_cadence_never_change_a_byte(
    store: Path, placement: str, commit_every: int
) -> None:
    _train(store, PLACEMENTS[placement], steps=6, commit_every=commit_every)
    with open_reader(store) as reader:
        assert reader.manifest.step == 6
        for name, found in read_all(reader).items():
            record = reader.records[name]
            added = 0 if record.shared else sum(range(1, 7))
            np.testing.assert_array_equal(found, content(record, 1) + np.uint8(added))
            crc = ChunkCrc(record)
            crc.feed(0, memoryview(found))
            np.testing.assert_array_equal(crc.table(), reader.checksums(name))


def test_steps_after_the_last_commit_are_undone_by_not_committing(store: Path) -> None:
    _train(store, {}, steps=5, commit_every=2)
    with open_reader(store) as reader:
        assert reader.manifest.step == 4
        found = read_all(reader)["even"]
    np.testing.assert_array_equal(found, content(RECORDS[2], 1) + np.uint8(10))


def test_traffic_counts_what_the_drives_moved(store: Path) -> None:
    padded = sum(record.padded_nbytes for record in MOVING)
    assert _train(store, {}, steps=3, commit_every=1) == (3 * padded, 3 * padded)
    load = padded + RECORDS[4].padded_nbytes
    assert _train(store, PLACEMENTS["memory"], steps=3, commit_every=3) == (load, padded)


def test_loading_tells_how_far_it_is(store: Path) -> None:
    seen: list[int] = []
    with open_writer(store) as writer, Arena(1 << 20) as arena:
        pool = Pool(writer, PLACEMENTS["memory"], {Tier.PINNED: arena})
        pool.load(seen.append)
        pool.close()
    assert sum(seen) == sum(record.nbytes for record in RECORDS)


def _flip(store: Path, name: str, byte: int) -> Path:
    with open_reader(store) as reader:
        size = reader.records[name].geometry.chunk_nbytes
        chunk = list(reader.chunks(name))[byte // size]
    with chunk.path.open("r+b") as file:
        file.seek(chunk.offset + byte % size)
        old = file.read(1)
        file.seek(chunk.offset + byte % size)
        file.write(bytes([old[0] ^ 0x10]))
    return chunk.path


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("byte", [0, 70_000, 9 * 4096 * 4 + 3])
def test_one_flipped_bit_stops_the_run_and_is_found_out_where(
    store: Path, placement: str, byte: int
) -> None:
    path = _flip(store, "u0.master", byte)
    chunk = byte // (4096 * 4)
    with pytest.raises(CorruptionError) as caught:
        _train(store, PLACEMENTS[placement], steps=1, commit_every=1)
    message = str(caught.value)
    assert f"record u0.master: chunk {chunk} is damaged on drive 0: {path} at offset" in message
    with open_reader(store) as reader:
        assert reader.manifest.step == 1


def test_a_gather_of_rows_does_not_disturb_the_first_pass(store: Path) -> None:
    _flip(store, "even", 20_000)
    with open_writer(store) as writer, Arena(1 << 20) as arena:
        pool = Pool(writer, {}, {Tier.PINNED: arena})
        pool.begin_step()
        with pytest.raises(CorruptionError, match="record even: chunk 1"):
            _stream_and_gather(pool, "even")
        pool.close()


def _stream_and_gather(pool: Pool, name: str) -> None:
    row, piece = memoryview(bytearray(100)), memoryview(bytearray(4096))
    for offset in range(0, 8 * 4096 * 4, 4096):
        pool.gather(name, 16_384, row)
        pool.read(name, offset, piece)
        pool.gather(name, 16_384, row)
        pool.gather(name, 300, row)


def test_a_first_pass_that_a_commit_cut_short_raises_no_false_alarm(store: Path) -> None:
    record = RECORDS[2]
    with open_writer(store) as writer, Arena(1 << 20) as arena:
        pool = Pool(
            writer, {r.name: Tier.PINNED for r in RECORDS if r is not record}, {Tier.PINNED: arena}
        )
        pool.load()
        pool.begin_step()
        pool.read(record.name, 0, memoryview(bytearray(4096)))
        for seed in (2, 3):
            pool.begin_step()
            data = content(record, seed)
            pool.write(record.name, 0, memoryview(data))
            crc = ChunkCrc(record)
            crc.feed(0, memoryview(data))
            tables = {r.name: pool.flush(r.name) for r in MOVING if r is not record}
            pool.commit(seed, {}, {**tables, record.name: crc.table()})
        pool.begin_step()
        for offset in range(0, record.nbytes, 4096):
            piece = bytearray(4096)
            pool.read(record.name, offset, memoryview(piece))
            assert piece == content(record, 3)[offset : offset + 4096].tobytes()
        pool.close()


def test_nothing_is_written_before_a_step_begins(store: Path) -> None:
    with open_writer(store) as writer, Arena(1 << 20) as arena:
        pool = Pool(writer, {"tiny": Tier.PINNED}, {Tier.PINNED: arena})
        pool.load()
        with pytest.raises(ValueError, match="no step has begun"):
            pool.write("even", 0, memoryview(bytes(4096)))
        with pytest.raises(ValueError, match="no step has begun"):
            pool.flush("tiny")
        pool.close()


def test_a_step_that_is_skipped_leaves_the_committed_one_as_input(store: Path) -> None:
    with open_writer(store) as writer, Arena(1 << 20) as arena:
        pool = Pool(writer, {}, {Tier.PINNED: arena})
        pool.begin_step()
        pool.begin_step()
        out = np.zeros(4096, np.uint8)
        pool.read("even", 0, memoryview(out))
        np.testing.assert_array_equal(out, content(RECORDS[2], 1)[:4096])
        pool.close()


def test_each_resident_lies_in_the_arena_of_its_tier(store: Path) -> None:
    with open_writer(store) as writer, Arena(1 << 20) as near, Arena(1 << 20) as far:
        pool = Pool(writer, PLACEMENTS["tiers"], {Tier.PINNED: near, Tier.CXL: far})
        assert [name for name, _ in near.table()] == ["u0.weights"]
        assert [name for name, _ in far.table()] == ["u0.master", "tiny"]
        pool.close()


def test_a_tier_without_an_arena_is_refused(store: Path) -> None:
    with (
        open_writer(store) as writer,
        Arena(4096) as arena,
        pytest.raises(ValueError, match=r"placed in cxl, which has no arena: u0\.master"),
    ):
        Pool(writer, {"u0.master": Tier.CXL}, {Tier.PINNED: arena})


def test_a_pool_needs_a_second_slot(tmp_path: Path) -> None:
    with small_chunks():
        store = make_store(tmp_path / "one", slots=1)
        with open_writer(store) as writer, Arena(4096) as arena:
            pool = Pool(writer, {}, {Tier.PINNED: arena})
            with pytest.raises(RefusedError, match="fit_slots"):
                pool.begin_step()
