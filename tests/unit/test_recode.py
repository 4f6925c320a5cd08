"""Cutting a store anew changes how its shards lie and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.recode import Cut, recode
from tests.support.tiering_crash import killed_everywhere
from tests.support.tiering_stores import (
    assert_state,
    content,
    fill,
    make_store,
    memory_folder,
    put,
    small_chunks,
    small_record,
)
from tiering.errors import CorruptionError, LockedError, UsageError
from tiering.store import open_reader, open_writer

RECORDS = (
    small_record("a.master", "float32", 9 * 4096 + 1, attributes={"unit": "a"}),
    small_record("a.weights", "bfloat16", 3 * 4096 + 100),
    small_record("carried", "float32", 77, shared=True),
)
ZSTD = Cut(codec="zstd")


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    with small_chunks(), memory_folder() as folder:
        yield folder


@pytest.fixture(name="store")
def _store(folder: Path) -> Path:
    drives = [folder / "a", folder / "b"]
    for drive in drives:
        drive.mkdir()
    return make_store(folder / "store", records=RECORDS, drives=drives, seed=1)


def _shards(store: Path) -> set[str]:
    return {
        path.name
        for drive in (store / "drives").iterdir()
        for path in drive.iterdir()
        if path.name != "drive.json"
    }


@pytest.mark.parametrize("there", [ZSTD, Cut(codec="none"), Cut(shard_nbytes=16 << 10)])
def test_there_and_back_leaves_every_byte_and_only_the_files_of_one_slot(
    store: Path, there: Cut
) -> None:
    back = Cut(codec="", shard_nbytes=32 << 10)
    for number, cut in enumerate((there, back), start=2):
        done = recode(store, cut)
        assert done is not None
        assert done.records == 3
        with open_reader(store) as reader:
            assert reader.manifest.generation == number
            assert_state(reader, 1)
            expected = {cut.apply(record).name: cut.apply(record) for record in RECORDS}
            assert {r.codec for r in reader.records.values()} == {
                r.codec for r in expected.values()
            }
            assert reader.records["a.master"].attributes == {"unit": "a"}
            linked = {chunk.path.name for name in reader.records for chunk in reader.chunks(name)}
        assert _shards(store) == linked
        assert len(list((store / "slots").iterdir())) == 2  # one slot, and the group's metadata


def test_a_store_goes_on_being_written_after_it_was_cut_anew(store: Path) -> None:
    recode(store, ZSTD)
    with open_writer(store) as writer:
        writer.ensure_slots(2)
        fill(writer, 2)
        fill(writer, 3)
    with open_reader(store) as reader:
        assert_state(reader, 3)
        assert {record.codec for record in reader.records.values()} == {"zstd"}


def test_only_the_records_that_are_named_change(store: Path) -> None:
    recode(store, Cut(codec="zstd", records=("*.master",)))
    with open_reader(store) as reader:
        assert {n: r.codec for n, r in reader.records.items()} == {
            "a.master": "zstd",
            "a.weights": None,
            "carried": None,
        }
        assert_state(reader, 1)


def test_retained_generations_stay_readable_as_they_were_cut(store: Path) -> None:
    with open_writer(store) as writer:
        writer.ensure_slots(3)
        fill(writer, 2, retain=2)
    recode(store, ZSTD)
    with open_reader(store, generation=2) as old, open_reader(store) as new:
        assert old.records["a.master"].codec is None
        assert new.records["a.master"].codec == "zstd"
        for reader in (old, new):
            assert_state(reader, 2)
    with open_writer(store) as writer:
        writer.ensure_slots(3)
        fill(writer, 3, retain=2)
    with open_reader(store, generation=3) as reader:
        assert_state(reader, 2)


@pytest.mark.parametrize("cut", [ZSTD, Cut(shard_nbytes=128 << 10)], ids=["codec", "size"])
def test_a_store_with_generations_of_two_cuts_is_reserved_and_written_on(
    store: Path, cut: Cut
) -> None:
    """The slot of the old cut is made anew when its generation is dropped, and not before."""
    with open_writer(store) as writer:
        writer.ensure_slots(3)
        fill(writer, 2, retain=2)
    recode(store, cut)
    with open_writer(store) as writer:
        writer.ensure_slots(3)
        writer.reserve()
        with open_reader(store, generation=2) as reader:
            assert_state(reader, 2)
        for seed in (4, 5, 6):
            fill(writer, seed, retain=2)
            with open_reader(store) as reader:
                assert_state(reader, seed)
    with open_writer(store, generation=5) as writer:
        assert writer.make_newest().parent == 5


def test_what_is_cut_so_already_is_left_alone(store: Path) -> None:
    assert recode(store, Cut(codec="")) is None
    with open_reader(store) as reader:
        assert reader.manifest.generation == 1


def test_a_name_that_no_record_has_is_an_error(store: Path) -> None:
    with pytest.raises(UsageError, match=r"\*\.exp_avg"):
        recode(store, Cut(codec="zstd", records=("*.exp_avg",)))


def test_a_codec_that_does_not_exist_is_named_with_its_neighbour() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'zstd'"):
        Cut(codec="zst")


def test_damage_is_found_on_the_way_and_nothing_is_committed(store: Path) -> None:
    with open_reader(store) as reader:
        path = reader.chunk("a.master", 2).path
    with path.open("r+b") as file:
        file.seek(5)
        file.write(b"\xff\x00")
    with pytest.raises(CorruptionError, match=rf"a\.master: chunk .*{path.name}"):
        recode(store, ZSTD)
    with open_reader(store) as reader:
        assert reader.manifest.generation == 1


def test_a_store_that_is_being_written_is_locked(store: Path) -> None:
    with open_writer(store), pytest.raises(LockedError, match=str(os.getpid())):
        recode(store, ZSTD)


def test_what_a_reader_holds_stays_until_it_is_done(store: Path) -> None:
    with open_reader(store) as reader:
        recode(store, ZSTD)
        assert_state(reader, 1)
    with open_writer(store) as writer:
        writer.ensure_slots(2)
        fill(writer, 2)
    with open_reader(store) as reader:
        assert_state(reader, 2)


def test_holes_stay_holes_and_zeros_take_no_room(folder: Path) -> None:
    records = [small_record("moments", "float32", 1 << 20)]
    store = make_store(folder / "zeros", records=records, seed=1)
    with open_writer(store) as writer:
        slot = writer.begin()
        checksums = {"moments": put(writer, slot, records[0], content(records[0], 1) * 0)}
        writer.commit(step=0, train_state={}, checksums=checksums)
    recode(store, ZSTD)
    with open_reader(store) as reader:
        files = {chunk.path for chunk in reader.chunks("moments")}
        assert sum(path.stat().st_size for path in files) < 16 << 10
    recode(store, Cut(codec=""))
    with open_reader(store) as reader:
        files = {chunk.path for chunk in reader.chunks("moments")}
        assert sum(512 * path.stat().st_blocks for path in files) < 2 << 20


def test_a_kill_anywhere_leaves_the_store_as_it_was_or_cut_anew(folder: Path) -> None:
    few = (small_record("a.master", "float32", 4097), RECORDS[-1])
    store = make_store(folder / "inside", records=few, seed=1)
    copy = folder / "copy"
    outcomes = set()
    for _ in killed_everywhere(lambda: _recode_copy(store, copy)):
        with open_reader(copy) as reader:
            assert_state(reader, 1)
            outcomes.add(reader.records["a.master"].codec)
        recode(copy, ZSTD)
        with open_reader(copy) as reader:
            assert_state(reader, 1)
            assert reader.records["a.master"].codec == "zstd"
            linked = {chunk.path.name for name in reader.records for chunk in reader.chunks(name)}
        assert linked <= _shards(copy)
    assert outcomes == {None, "zstd"}


def _recode_copy(store: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(store, copy, symlinks=True)
    recode(copy, ZSTD)
