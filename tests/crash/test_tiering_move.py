from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiering_crash import killed_everywhere
from tests.support.tiering_stores import (
    assert_state,
    equal_rates,
    fill,
    make_store,
    memory_folder,
    small_chunks,
)
from tiering import fsops
from tiering.errors import CapacityError, StorageError
from tiering.moving import move_store
from tiering.records import Record
from tiering.store import open_reader, open_writer

RECORDS = (
    Record(name="a", dtype="float32", length=3 * 4096 + 1),
    Record(name="b", dtype="bfloat16", length=10),
    Record(name="c", dtype="float32", length=3, shared=True),
)


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    with small_chunks(chunk_length=4096, shard_nbytes=32 << 10), memory_folder() as folder:
        for name in "pqr":
            (folder / name).mkdir()
        yield folder


def _links(store: Path) -> dict[str, str]:
    """Return the folder of each shard file by its name."""
    links = store.glob("slots/*/*/c/*")
    return {link.resolve().name: link.resolve().parent.parent.name for link in links}


def _copy_of(before: Path, after: Path, drives: list[Path]) -> None:
    """Give ``after`` the store of ``before``, with drives of its own."""
    shutil.rmtree(after, ignore_errors=True)
    for drive in drives:
        for path in drive.iterdir():
            shutil.rmtree(path)
    shutil.copytree(before, after, symlinks=True)


def _assert_clean(store: Path, drives: list[Path], used: list[Path]) -> None:
    """Check that every file has a link, and that only the drives in use have a folder."""
    names = set(_links(store))
    found = set()
    for drive in drives:
        [*folders] = drive.iterdir()
        assert len(folders) == (drive in used), drive
        for folder in folders:
            found |= {path.name for path in folder.iterdir()} - {"drive.json"}
    assert found == names
    assert not (store / "shards").exists()
    assert {link.resolve().parent for link in (store / "drives").iterdir()} == set(used)
    assert {path.name for path in store.iterdir()} <= {
        "LOCK", "zarr.json", "zarr.json.new", "manifests", "schema", "slots", "drives"
    }


@pytest.mark.parametrize("goes_on", ["moves again", "trains first"])
def test_a_kill_anywhere_in_a_move_leaves_a_whole_store_that_a_second_run_finishes(
    folder: Path, goes_on: str
) -> None:
    """From inside the store to two drives, with a retained generation and a free slot."""
    before = make_store(folder / "before", records=RECORDS, slots=3)
    with open_writer(before) as writer:
        fill(writer, 2, retain=2)
    store, drives = folder / "store", [folder / "p", folder / "q"]

    def move() -> None:
        _copy_of(before, store, drives)
        move_store(store, drives, measure=equal_rates)

    kills = 0
    for _ in killed_everywhere(move):
        kills += 1
        seeds = _assert_whole(store)
        assert seeds == [1, 2]
        if goes_on == "trains first":
            with open_writer(store) as writer:
                fill(writer, 3, retain=2)
        move_store(store, drives, measure=equal_rates)
        assert _assert_whole(store) == ([1, 2] if goes_on == "moves again" else [2, 3])
        _assert_clean(store, drives, drives)
    assert kills > 50


def _assert_whole(store: Path) -> list[int]:
    with open_reader(store) as reader:
        generations = reader.root.generations
    for generation in generations:
        with open_reader(store, generation=generation.number) as reader:
            assert_state(reader, generation.step)
    return [generation.step for generation in generations]
