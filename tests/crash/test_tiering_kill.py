from __future__ import annotations

import shutil
from collections.abc import Iterator
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
from tiering.errors import RefusedError
from tiering.store import create_store, open_reader, open_writer

RECORDS = (
    small_record("a", "float32", 4097),
    small_record("b", "bfloat16", 10),
    small_record("c", "float32", 3, shared=True),
    small_record("d", "float32", 2 * 4096 + 5, codec="blosc-lz4-bitshuffle"),
)


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    with small_chunks(), memory_folder() as folder:
        yield folder


def test_a_kill_while_creating_leaves_the_whole_store_or_none(folder: Path) -> None:
    drives = [folder / "a", folder / "b"]
    for drive in drives:
        drive.mkdir()
    store = folder / "store"
    outcomes = set()
    for _ in killed_everywhere(lambda: _create_anew(store, drives)):
        whole = _is_whole(store, seed=1)
        outcomes.add(whole)
        if whole:
            with open_writer(store) as writer:
                fill(writer, 2)
        else:
            make_store(store, records=RECORDS, drives=drives, seed=2)
        assert _is_whole(store, seed=2)
        assert not (store / "CREATING").exists()
        assert [len(list(drive.iterdir())) for drive in drives] == [1, 1]
    assert outcomes == {False, True}


def _create_anew(store: Path, drives: list[Path]) -> None:
    _remove(store, drives)
    make_store(store, records=RECORDS, drives=drives, seed=1)


def _remove(store: Path, drives: list[Path]) -> None:
    shutil.rmtree(store, ignore_errors=True)
    for folder in (child for drive in drives for child in drive.iterdir()):
        shutil.rmtree(folder)


def _is_whole(store: Path, seed: int) -> bool:
    try:
        reader = open_reader(store)
    except RefusedError as error:
        return "no store" not in str(error)
    with reader:
        assert_state(reader, seed)
    return True


def test_a_kill_while_giving_up_a_creation_leaves_a_place_to_create_in(folder: Path) -> None:
    drives = [folder / "a"]
    drives[0].mkdir()
    store = folder / "store"
    for _ in killed_everywhere(lambda: _give_up(store, drives)):
        make_store(store, records=RECORDS, drives=drives)
        assert _is_whole(store, seed=1)
        assert len(list(drives[0].iterdir())) == 1
        _remove(store, drives)


def _give_up(store: Path, drives: list[Path]) -> None:
    with pytest.raises(ZeroDivisionError):
        _fail_to_create(store, drives)


def _fail_to_create(store: Path, drives: list[Path]) -> None:
    with create_store(store, records=RECORDS, schema_files={}, drives=drives):
        raise ZeroDivisionError


@pytest.mark.parametrize("slots", [1, 3])
def test_a_kill_anywhere_in_opening_and_committing_leaves_one_whole_generation(
    folder: Path, slots: int
) -> None:
    """With one slot to begin with, the others are made under the same kills."""
    before = make_store(folder / "before", records=RECORDS, slots=slots)
    with open_writer(before) as writer:
        writer.ensure_slots(2)
        fill(writer, 2)
    store = folder / "store"
    steps = []
    for _ in killed_everywhere(lambda: _advance_copy(before, store)):
        with open_reader(store) as reader:
            assert_state(reader, reader.manifest.step)
            steps.append(reader.manifest.step)
        _advance(store)
        assert _listed_are_whole(store) == 2
    assert steps == sorted(steps)
    assert set(steps) == {2, 3}, "kills on both sides of the rename were expected"


def _advance_copy(before: Path, store: Path) -> None:
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(before, store, symlinks=True)
    _advance(store)


def _advance(store: Path) -> None:
    with open_writer(store) as writer:
        writer.ensure_slots(3)
        writer.reserve()
        fill(writer, writer.manifest.step + 1, retain=2)


def _listed_are_whole(store: Path) -> int:
    with open_writer(store) as writer:
        assert writer.root is not None
        generations = writer.root.generations
        manifests = {path.name for path in (store / "manifests").iterdir()}
    assert manifests == {str(g.number) for g in generations}
    for generation in generations:
        with open_reader(store, generation=generation.number) as reader:
            assert_state(reader, generation.step)
    return len(generations)
