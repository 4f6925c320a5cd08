"""Going back to an older generation and dropping some, killed anywhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.tiering_crash import killed_everywhere
from tests.support.tiering_stores import (
    assert_state,
    fill,
    make_store,
    memory_folder,
    small_chunks,
    small_record,
)
from tiering.errors import CorruptionError, StorageError
from tiering.generations import read_root
from tiering.store import open_newest_whole, open_reader, open_writer

RECORDS = (
    small_record("a", "float32", 4097),
    small_record("c", "float32", 3, shared=True),
    small_record("d", "float32", 5, codec="zstd"),
)

DAMAGE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda store: None,
    "manifest": lambda store: os.truncate(store / "manifests/3/manifest.json", 10),
    "shard": lambda store: (store / "slots/2/a/c/0").resolve().unlink(),
}


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    with small_chunks(), memory_folder() as folder:
        yield folder


def _three_generations(path: Path) -> Path:
    store = make_store(path, records=RECORDS, slots=4)
    with open_writer(store) as writer:
        for seed in (2, 3):
            fill(writer, seed, retain=3)
    return store


def _copied(before: Path, store: Path) -> Path:
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(before, store, symlinks=True)
    return store


def _listed(store: Path) -> dict[int, int]:
    return {g.number: g.step for g in read_root(store).generations}


def _slots(store: Path) -> set[int]:
    return {int(path.name) for path in (store / "slots").iterdir() if path.is_dir()}


def _assert_whole(store: Path, numbers: set[int]) -> None:
    for number, step in _listed(store).items():
        if number in numbers:
            with open_reader(store, generation=number) as reader:
                assert_state(reader, step)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_kill_anywhere_in_a_roll_back_leaves_it_done_or_not_begun(
    folder: Path, kind: str
) -> None:
    before = _three_generations(folder / "before")
    DAMAGE[kind](before)
    whole = {1, 2, 4} if kind != "nothing" else {1, 2, 3, 4}
    done = {2: 2, 4: 1} if kind != "nothing" else {2: 2, 3: 3, 4: 1}
    after = dict(list((done | {5: 9}).items())[-3:])
    store, seen = folder / "store", []

    def roll_back() -> None:
        with open_writer(_copied(before, store), generation=1) as writer:
            writer.make_newest()
            writer.ensure_slots(4)
            fill(writer, 9, retain=3)

    for _ in killed_everywhere(roll_back):
        listed = _listed(store)
        seen.append(tuple(listed))
        assert listed in ({1: 1, 2: 2, 3: 3}, done, after)
        _assert_whole(store, whole | {5})
        with open_newest_whole(store) as writer:
            newest = max(number for number in listed if number in whole | {5})
            assert writer.manifest.generation == newest
            writer.make_newest()
            writer.ensure_slots(4)
            fill(writer, 7, retain=2)
        _assert_whole(store, set(_listed(store)))
        assert {p.name for p in (store / "manifests").iterdir()} == set(map(str, _listed(store)))
    assert len(set(seen)) == 3, "kills on both sides of each rename were expected"


def test_fewer_slots_than_generations_still_leave_one_to_write_to(folder: Path) -> None:
    store = _three_generations(folder / "store")
    [free] = _slots(store) - {g.slot for g in read_root(store).generations}
    (store / f"slots/{free}/a/zarr.json").unlink()
    with open_writer(store) as writer:
        writer.fit_slots(2)
        fill(writer, 4)
    assert _listed(store) == {4: 4}


def test_free_slots_that_no_commit_needs_are_removed(folder: Path) -> None:
    store = _three_generations(folder / "store")
    for seed, slots, left in (4, 9, 9), (5, 2, 4), (6, 2, 2), (7, 3, 3):
        with open_writer(store) as writer:
            writer.fit_slots(slots)
            assert len(_slots(store)) == left
            fill(writer, seed, retain=3 if slots == 9 else 1)
        _assert_whole(store, set(_listed(store)))


def test_a_slot_that_is_read_stays_until_nobody_reads_it(folder: Path) -> None:
    store = _three_generations(folder / "store")
    with open_reader(store, generation=1) as reader, open_writer(store) as writer:
        writer.drop_generations(keep=1)
        writer.fit_slots(2)
        assert_state(reader, 1)
        assert len(_slots(store)) == 3
    with open_writer(store) as writer:
        writer.fit_slots(2)
        assert len(_slots(store)) == 2


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_kill_anywhere_in_a_prune_leaves_whole_generations_and_it_can_be_repeated(
    folder: Path, kind: str
) -> None:
    before = _three_generations(folder / "before")
    DAMAGE[kind](before)
    store, whole = folder / "store", {1, 2, 4} if kind != "nothing" else {1, 2, 3}

    def prune() -> None:
        with open_newest_whole(store) as writer:
            writer.make_newest()
            writer.drop_generations(keep=1)
            writer.drop_free_slots(keep=1)

    def copy_and_prune() -> None:
        _copied(before, store)
        prune()

    for _ in killed_everywhere(copy_and_prune):
        _assert_whole(store, whole)
        prune()
        assert _listed(store) == ({3: 3} if kind == "nothing" else {4: 2})
        _assert_whole(store, set(_listed(store)))
        slots = [path for path in (store / "slots").iterdir() if path.is_dir()]
        assert len(slots) == 2
        linked = {link.resolve() for link in (store / "slots").glob("*/*/c/*")}
        assert {p for p in (store / "shards").iterdir() if p.name != "drive.json"} == linked


def test_a_roll_back_keeps_every_other_state_and_moves_nothing(folder: Path) -> None:
    store = _three_generations(folder / "store")
    shards = {p: p.stat().st_mtime_ns for p in (store / "shards").iterdir()}
    with open_writer(store, generation=2) as writer:
        generation = writer.make_newest()
    assert (generation.number, generation.parent, generation.slot) == (4, 2, 1)
    assert _listed(store) == {1: 1, 3: 3, 4: 2}
    _assert_whole(store, {1, 3, 4})
    assert {p: p.stat().st_mtime_ns for p in (store / "shards").iterdir()} == shards


def _foreign(folder: Path) -> Path:
    """Another store with the same records, which has come further."""
    store = make_store(folder / "foreign", records=RECORDS)
    with open_writer(store) as writer:
        for seed in range(2, 9):
            fill(writer, seed)
    return store


def _touch_all(store: Path, foreign: Path) -> None:
    for number, path in enumerate(sorted(store.rglob("*"), reverse=True)):
        os.utime(path, (10**9 + number, 10**9 + number), follow_symlinks=False)


IGNORED: dict[str, Callable[[Path, Path], object]] = {
    "times": _touch_all,
    "its own manifest again, under a higher number": lambda store, foreign: shutil.copytree(
        store / "manifests/2", store / "manifests/99"
    ),
    "another store's newest manifest": lambda store, foreign: shutil.copytree(
        foreign / "manifests/8", store / "manifests/8"
    ),
}
REFUSED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "its newest manifest under a higher number": (
        lambda store, foreign: (store / "manifests/3").rename(store / "manifests/99"),
        r"manifests/3/manifest\.json: missing, though .* lists .*\n"
        r"generation 3 \(step 3\) is damaged; .*--generation 2 ",
    ),
    "another store's manifest in the place of its newest": (
        lambda store, foreign: shutil.copytree(
            foreign / "manifests/8", store / "manifests/3", dirs_exist_ok=True
        ),
        r"manifests/3/manifest\.json: found sha256 \w+, the root names \w+",
    ),
    "another store's root": (
        lambda store, foreign: shutil.copy(foreign / "zarr.json", store),
        r"drive\.json: belongs to drive 0 of store \w+, expected drive 0 of store \w+|"
        r"manifests/8/manifest\.json: missing",
    ),
}


@pytest.mark.parametrize("kind", IGNORED)
def test_the_newest_generation_is_the_one_that_the_root_names_last(folder: Path, kind: str) -> None:
    store, foreign = _three_generations(folder / "store"), _foreign(folder)
    IGNORED[kind](store, foreign)
    with open_reader(store) as reader:
        assert reader.manifest.generation == 3
        assert_state(reader, 3)
    with open_newest_whole(store) as writer:
        assert fill(writer, 4, retain=3).number == 4
    _assert_whole(store, {2, 3, 4})


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_root_names_is_refused_if_it_is_of_another_store_or_elsewhere(
    folder: Path, kind: str
) -> None:
    store, foreign = _three_generations(folder / "store"), _foreign(folder)
    change, said = REFUSED[kind]
    change(store, foreign)
    for open_it in (open_reader, open_writer):
        with pytest.raises(CorruptionError, match=said):
            open_it(store)
    if kind != "another store's root":
        with open_newest_whole(store) as writer:
            assert writer.manifest.generation == 2
            writer.make_newest()
        _assert_whole(store, {1, 4})


def test_a_reader_of_the_generation_that_comes_back_is_not_disturbed(folder: Path) -> None:
    store = _three_generations(folder / "store")
    with open_reader(store, generation=1) as reader:
        with open_writer(store, generation=1) as writer:
            writer.make_newest()
            for seed in (5, 6):
                fill(writer, seed)
                assert_state(reader, 1)
            assert writer.root is not None
            assert all(g.slot != reader.generation.slot for g in writer.root.generations)
            assert writer.begin(wait_s=0) != reader.generation.slot
        assert_state(reader, 1)


def test_nothing_is_written_while_the_open_generation_is_not_the_newest(folder: Path) -> None:
    store = _three_generations(folder / "store")
    with open_writer(store, generation=1) as writer, pytest.raises(ValueError, match="not the new"):
        writer.begin()


def test_a_store_without_a_whole_generation_is_refused_by_the_damage_of_the_newest(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = _three_generations(folder / "store")
    for number in (1, 2, 3):
        os.truncate(store / f"manifests/{number}/manifest.json", number)
    with pytest.raises(CorruptionError, match=r"manifests/3/manifest\.json"):
        open_newest_whole(store)
    assert _listed(store) == {1: 1, 2: 2, 3: 3}


def test_each_generation_that_is_skipped_is_named_with_its_damage(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = _three_generations(folder / "store")
    DAMAGE["shard"](store)
    os.truncate(store / "manifests/2/checksums.bin", 0)
    with open_newest_whole(store) as writer:
        assert writer.manifest.generation == 1
    said = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(said) == 2
    assert "generation 3 (step 3)" in said[0]
    assert "2.a.0" in said[0]
    assert "manifests/2/checksums.bin" in said[1]


def test_a_generation_that_cannot_be_read_is_not_skipped_unless_another_is_named(
    folder: Path,
) -> None:
    """A drive that fails may give the bytes back later: that is for the user to decide."""
    store = _three_generations(folder / "store")
    manifest = store / "manifests/3/manifest.json"
    manifest.unlink()
    manifest.symlink_to("/proc/self/mem")  # reading fails: nothing is at address 0
    with pytest.raises(StorageError, match=r"manifests/3/manifest\.json"):
        open_newest_whole(store)
    with open_writer(store, generation=2) as writer:
        writer.make_newest()
    assert _listed(store) == {1: 1, 4: 2}
    _assert_whole(store, {1, 4})
