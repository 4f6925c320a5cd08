from __future__ import annotations

import errno
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
from tiering import fsops
from tiering.bandwidth import Rates
from tiering.errors import StorageError
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
    """Make a store whose slot 1 holds the generation, and slot 0 none."""
    store = make_store(live / "store", records=RECORDS, drives=[live / name for name in drives])
    with open_writer(store) as writer:
        fill(writer, 2, retain=1)
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
    ("begin", "end"),
    [("", "pq"), ("pq", "qr")],
    ids=["out of the store", "a drive stays"],
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
        assert _assert_whole(store) == [2]
        if trains_first := kills % 2:
            with open_writer(store) as writer:
                fill(writer, 3, retain=1)
        _move(live, end)
        assert _assert_whole(store) == ([3] if trains_first else [2])
        _assert_clean(live, end)
    assert kills > 50


def _assert_whole(store: Path) -> list[int]:
    with open_reader(store) as reader:
        generations = reader.root.generations
    for generation in generations:
        with open_reader(store, generation=generation.number) as reader:
            assert_state(reader, generation.step)
    return [generation.step for generation in generations]


def test_bytes_are_durable_before_names_names_before_links_and_the_old_file_goes_last(
    live: Path,
) -> None:
    store = _make(live, "p")
    log: list[tuple[str, str]] = []

    def note(action: str, path: Path) -> None:
        log.append((action, str(path.relative_to(live))))

    with fsops.observed(note):
        _move(live, "q")
    [new] = (path.name for path in (live / "q").iterdir())
    old = f"p/{new}"
    copy, final = f"q/{new}/0.a.0.unfinished", f"q/{new}/0.a.0"
    order = [
        ("link", "store/drives/1"),
        ("fsync folder", "store/drives"),
        ("create folder", f"q/{new}"),
        ("fsync", f"q/{new}/drive.json"),
        ("fsync folder", f"q/{new}"),
        ("fsync folder", "q"),
        ("rename", "store/zarr.json"),
        ("fsync folder", "store"),
        ("create", copy),
        ("fsync", copy),
        ("rename", final),
        ("fsync folder", f"q/{new}"),
        ("rename", "store/slots/0/a/c/0"),
        ("fsync folder", "store/slots/0/a/c"),
        ("remove", f"{old}/0.a.0"),
        ("rename", "store/zarr.json"),
        ("fsync folder", "store"),
        ("remove", f"{old}/drive.json"),
        ("remove", old),
        ("fsync folder", "p"),
        ("remove", "store/drives/0"),
        ("fsync folder", "store/drives"),
    ]
    left = iter(log)
    missing = [step for step in order if step not in left]
    assert not missing, "each step follows the one before"
    assert _assert_whole(store) == [2]


def test_a_move_that_was_killed_goes_on_with_the_shares_that_it_began_with(live: Path) -> None:
    store = _make(live, "p")

    def fast_q(folder: Path) -> Rates:
        rate = 3e9 if live / "q" in (folder, folder.parent) else 1e9
        return Rates(read_bytes_per_s=rate, written_bytes_per_s=rate)

    def fail(action: str, path: Path) -> None:
        if action == "remove" and path.name.startswith("0.a"):
            raise OSError(errno.EIO, "injected")

    folders = [live / "q", live / "r"]
    with fsops.observed(fail), pytest.raises(StorageError):
        move_store(store, folders, measure=fast_q)
    move_store(store, folders, measure=equal_rates)
    with open_reader(store) as reader:
        assert reader.root.drives == {1: 0.75, 2: 0.25}
    move_store(store, folders, measure=equal_rates)
    with open_reader(store) as reader:
        assert reader.root.drives == {1: 0.5, 2: 0.5}


def test_only_remains_of_a_move_are_removed_before_the_next(live: Path) -> None:
    store = _make(live, "p")
    [folder] = (live / "p").iterdir()
    remains = ("0.a.1.unfinished", "0.a.7", "shared.c.5")
    mine = ("1.backup.2", "a.0", "0.a.0.orig", "0.a.1.old")
    for name in (*remains, *mine):
        (folder / name).write_bytes(b"x")
    _move(live, "pq")
    found = {path.name for path in folder.iterdir()}
    assert found >= set(mine)
    assert not found & set(remains)
    assert _assert_whole(store) == [2]
