from __future__ import annotations

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
    small_record,
)
from tiering.moving import Moved, move_store
from tiering.store import open_reader, open_writer

DRIVES = "pqr"
RECORDS = (
    small_record("a", "float32", 8193),  # two shards
    small_record("c", "float32", 3, shared=True),
)


@pytest.fixture(name="live")
def _live() -> Iterator[Path]:
    """Lend the folder of a store and of three drives."""
    with small_chunks(), memory_folder() as folder:
        live = folder / "live"
        for name in ("", *DRIVES):
            (live / name).mkdir()
        yield live


def _make(live: Path, drives: str) -> Path:
    """Make a store with slots of a generation, of a retained one, and of none."""
    store = make_store(
        live / "store", records=RECORDS, slots=3, drives=[live / name for name in drives]
    )
    with open_writer(store) as writer:
        fill(writer, 2, retain=2)
    return store


def _move(live: Path, drives: str) -> Moved:
    return move_store(live / "store", [live / name for name in drives], measure=equal_rates)


def _assert_clean(live: Path, drives: str) -> None:
    """Check that every file has a link, and that only the drives in use have a folder."""
    store = live / "store"
    linked = {link.resolve() for link in store.glob("slots/*/*/c/*")}
    folders = [folder for name in DRIVES for folder in (live / name).iterdir()]
    assert [folder.parent.name for folder in folders] == list(drives)
    assert {p for f in folders for p in f.iterdir() if p.name != "drive.json"} == linked
    assert {link.resolve() for link in (store / "drives").iterdir()} == set(folders)
    names = {"LOCK", "zarr.json", "manifests", "schema", "slots", "drives"}
    assert {path.name for path in store.iterdir()} - {"zarr.json.new"} == names


@pytest.mark.parametrize(
    ("begin", "end"), [("", "pq"), ("pq", "qr")], ids=["out of the store", "a drive stays"]
)
def test_a_kill_anywhere_in_a_move_leaves_a_whole_store_that_a_second_run_finishes(
    live: Path, begin: str, end: str
) -> None:
    store = _make(live, begin)
    saved = shutil.copytree(live, live.parent / "saved", symlinks=True)

    def move() -> None:
        shutil.rmtree(live)
        shutil.copytree(saved, live, symlinks=True)
        _move(live, end)

    kills = 0
    for kills in killed_everywhere(move):
        assert _assert_whole(store) == [1, 2]
        if trains_first := kills % 2:
            with open_writer(store) as writer:
                fill(writer, 3, retain=2)
        _move(live, end)
        assert _assert_whole(store) == ([2, 3] if trains_first else [1, 2])
        _assert_clean(live, end)
    assert kills > 50


def _assert_whole(store: Path) -> list[int]:
    with open_reader(store) as reader:
        generations = reader.root.generations
    for generation in generations:
        with open_reader(store, generation=generation.number) as reader:
            assert_state(reader, generation.step)
    return [generation.step for generation in generations]
