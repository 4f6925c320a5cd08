"""A copy of a store has the original's drives, until it is given its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint.recode import Cut, recode
from checkpoint.retention import prune
from checkpoint.verify import verify
from tests.support.loops import memory_mount
from tests.support.tiering_stores import (
    assert_state,
    equal_rates,
    fill,
    make_store,
    memory_folder,
    small_chunks,
)
from tiering import fsops
from tiering.attaching import attach_drives
from tiering.drives import create_drive, find_drives, open_drives
from tiering.errors import LockedError, RefusedError, StorageError
from tiering.generations import read_root
from tiering.labels import read_owner
from tiering.moving import move_store
from tiering.store import create_store, open_newest_whole, open_reader, open_writer

GONE = r"drive 0 in .*/p/megatrain-\w+ belongs to the store .*/store, which is not there now"


@pytest.fixture(name="place")
def _place() -> Iterator[Path]:
    with small_chunks(), memory_folder() as folder:
        for name in "pq":
            (folder / name).mkdir()
        yield folder


def _make(place: Path) -> Path:
    return make_store(place / "store", drives=[place / "p", place / "q"])


def _copy(store: Path, name: str = "copy") -> Path:
    return shutil.copytree(store, store.with_name(name), symlinks=True)


def _everything(place: Path) -> dict[str, bytes]:
    """Return every name with its content or target."""
    return {
        str(path): os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        for path in sorted(place.rglob("*"))
        if (path.is_symlink() or path.is_file()) and path.name != "LOCK"
    }


def _go_on(store: Path, step: int) -> None:
    with open_writer(store) as writer:
        fill(writer, step)


def _assert_step(store: Path, step: int) -> None:
    with open_reader(store) as reader:
        assert_state(reader, step)


def _folder(place: Path, name: str) -> Path:
    """Return the only drive in a folder."""
    [found] = (place / name).iterdir()
    return found


WRITERS: dict[str, Callable[[Path], object]] = {
    "train": lambda copy: _go_on(copy, 2),
    "resume": lambda copy: open_newest_whole(copy).close(),
    "shard away": lambda copy: move_store(copy, [copy], measure=equal_rates),
    "shard to fewer": lambda copy: move_store(copy, [copy.parent / "p"], measure=equal_rates),
    "encode": lambda copy: recode(copy, Cut(codec="zstd", shard_nbytes=None, records=("*",))),
    "prune": lambda copy: prune(copy, yes=True),
    "attach": lambda copy: attach_drives(copy, [copy.parent / "p"]),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_writes_refuses_a_copy_that_shares_a_drive(
    place: Path, write: Callable[[Path], object]
) -> None:
    copy = _copy(_make(place))
    before = _everything(place)
    with pytest.raises(RefusedError, match=r"/copy is a copy of .*/store, and both have their"):
        write(copy)
    assert _everything(place) == before
    _assert_step(copy, 1)  # to read it harms nobody


def test_a_copy_with_drives_of_its_own_is_not_led_to_those_of_the_store(place: Path) -> None:
    copy = _copy(_make(place))
    for name in "pq":
        shutil.copytree(_folder(place, name), place / f"copy of {name}")
    attach_drives(copy, [place / "copy of p", place / "copy of q"])
    before = _everything(place)
    with pytest.raises(RefusedError, match=r"/copy is a copy of .*/store, and both have their"):
        attach_drives(copy, [place / "p"])
    assert _everything(place) == before


def test_a_link_to_the_shards_of_the_store_is_shared_by_its_copy(place: Path) -> None:
    store = make_store(place / "store")
    (store / "shards").rename(place / "p/elsewhere")
    (store / "shards").symlink_to(place / "p/elsewhere")
    _go_on(store, 2)
    copy = _copy(store)
    with pytest.raises(RefusedError, match=r"copy of .*/store"):
        _go_on(copy, 3)
    _assert_step(store, 2)


def test_a_copy_with_all_its_drives_copied_is_a_store_of_its_own(place: Path) -> None:
    store = _make(place)
    copy = _copy(store)
    for name in "pq":
        shutil.copytree(_folder(place, name), place / f"copy of {name}")
    attach_drives(copy, [place / "copy of p"])
    with pytest.raises(RefusedError, match=r"both have their shards in .*/q/megatrain-"):
        _go_on(copy, 2)
    attach_drives(copy, [place / "copy of q"])
    _go_on(copy, 2)
    _go_on(copy, 3)
    _assert_step(store, 1)
    _go_on(store, 5)
    move_store(store, [place / "p"], measure=equal_rates)
    _assert_step(copy, 3)
    assert verify(copy, deep=True).ok
    assert verify(store, deep=True).ok


def test_files_with_two_names_are_not_written_in_place(place: Path) -> None:
    store = make_store(place / "store")
    copy = shutil.copytree(store, place / "copy", symlinks=True, copy_function=os.link)
    for linked in (store, copy):
        with pytest.raises(RefusedError, match=r"shards/.* has 2 names \(cp -l, or a program"):
            _go_on(linked, 2)
    shutil.copytree(copy / "shards", place / "own")
    shutil.rmtree(copy / "shards")
    (place / "own").rename(copy / "shards")
    _go_on(store, 2)
    _go_on(copy, 3)
    _assert_step(store, 2)


def test_a_store_that_lies_in_one_folder_is_copied_and_moved_as_it_is(place: Path) -> None:
    store = make_store(place / "store")
    copy = _copy(store)
    _go_on(copy, 2)
    _assert_step(store, 1)
    store.rename(place / "moved")
    before = _everything(place / "moved/shards")
    with open_writer(place / "moved"):
        assert _everything(place / "moved/shards") == before


def test_a_store_that_was_renamed_goes_on_and_its_copy_is_refused(place: Path) -> None:
    moved = _make(place).rename(place / "moved")
    copy = _copy(moved)
    with pytest.raises(RefusedError, match=GONE):
        _go_on(copy, 2)  # nobody has told the drives yet where the store is now
    _go_on(moved, 2)
    with pytest.raises(RefusedError, match=r"copy is a copy of .*/moved, and both"):
        _go_on(copy, 3)
    _assert_step(moved, 2)


def test_a_copy_takes_the_place_of_a_store_that_is_gone_once_it_is_told(place: Path) -> None:
    store = _make(place)
    copy = _copy(store)
    away = store.rename(place / "unplugged")
    (place / "empty").mkdir()
    with pytest.raises(RefusedError, match=GONE) as refused:
        _go_on(copy, 2)
    folders = [_folder(place, name) for name in "pq"]
    assert str(refused.value).endswith(f"megatrain-ckpt attach {copy} --drive {folders[0]}")
    attach_drives(copy, folders)
    _go_on(copy, 2)
    away.rename(store)  # plugged in again: it would write over what the copy has become
    with pytest.raises(RefusedError, match=r"/store is a copy of .*/copy, and both"):
        _go_on(store, 3)
    _assert_step(copy, 2)


def test_a_copy_is_not_given_the_drives_that_a_renamed_store_writes(place: Path) -> None:
    store = _make(place)
    copy = _copy(store)
    with open_writer(store) as writer:
        store.rename(place / "renamed")
        before = _everything(place)
        with pytest.raises(LockedError, match=rf"{place / 'p'}.*another lock file"):
            attach_drives(copy, [place / "p", place / "q"])
        assert _everything(place) == before
        assert writer.manifest.step == 1


def test_a_drive_that_says_nothing_of_its_store_belongs_to_the_first_that_writes(
    place: Path,
) -> None:
    store = _make(place)
    uuid = read_root(store).uuid
    for name, number in ("p", 0), ("q", 1):
        label = _folder(place, name) / "drive.json"
        label.write_text(f'{{"format": 1, "uuid": "{uuid}", "drive": {number}}}')
    copy = _copy(store)
    _go_on(store, 2)
    owner = read_owner(_folder(place, "p"))
    assert owner is not None
    assert owner.store == store
    with pytest.raises(RefusedError, match=r"copy is a copy of .*/store"):
        _go_on(copy, 2)


def test_a_label_that_does_not_tell_is_found_refused_and_written_anew_by_attach(
    place: Path,
) -> None:
    store = _make(place)
    label = _folder(place, "p") / "drive.json"
    label.write_text(label.read_text().replace("/store", "/stork"))
    [finding] = verify(store).findings
    assert (finding.file, finding.drive) == (str(label), 0)
    with pytest.raises(RefusedError, match=r"check: found .* attach .*/store --drive .*/p/mega"):
        _go_on(store, 2)
    attach_drives(store, [place / "p"])
    assert verify(store).ok
    _go_on(store, 2)


def test_a_path_that_is_no_text_is_remembered(place: Path) -> None:
    (place / os.fsdecode(b"\xff \xc3\xa9")).mkdir()
    store = make_store(place / os.fsdecode(b"\xff \xc3\xa9/store"), drives=[place / "p"])
    owner = read_owner(_folder(place, "p"))
    assert owner is not None
    assert owner.store == store
    assert verify(store).ok


def test_what_was_made_on_drives_whose_path_is_no_text_is_found_again(place: Path) -> None:
    folder = place / os.fsdecode(b"\xff \xc3\xa9")
    folder.mkdir()
    with open_reader(make_store(place / "like")) as reader:
        records = list(reader.records.values())
    with create_store(
        place / "store", records=records, schema_files={"schema.json": b"{}"}, drives=[folder]
    ):
        assert list(folder.glob("megatrain-*/*"))
    assert not any(folder.iterdir())
    assert verify(make_store(place / "store", drives=[folder])).ok


def test_what_a_copy_of_a_move_in_progress_clears_is_only_its_own(place: Path) -> None:
    store = make_store(place / "store")
    root = read_root(store)
    present = open_drives(store, root.uuid, root.drives)
    [new] = find_drives(store, root.uuid, [place / "p"], present)
    create_drive(store, root.uuid, new)  # and not listed yet
    copy = _copy(store)
    before = _everything(place / "p")
    move_store(copy, [copy], measure=equal_rates)
    assert _everything(place / "p") == before
    assert not os.path.lexists(copy / "drives" / str(new.number))
    move_store(store, [place / "p"], measure=equal_rates)
    _assert_step(store, 1)


def test_what_a_copy_of_a_creation_in_progress_clears_is_only_its_own(place: Path) -> None:
    with open_reader(make_store(place / "like")) as reader:
        records = list(reader.records.values())

    def create(store: Path):  # type: ignore[no-untyped-def]
        folders = [place / "p"]
        return create_store(
            store, records=records, schema_files={"schema.json": b"{}"}, drives=folders
        )

    with create(place / "store") as writer:
        copy = _copy(place / "store")
        fill(writer, 1)
    before = _everything(place / "p")
    with create(copy) as writer:
        fill(writer, 2)
    assert before.items() <= _everything(place / "p").items()
    _assert_step(place / "store", 1)
    _assert_step(copy, 2)


def test_a_drive_that_cannot_be_written_is_attached_for_reading(place: Path) -> None:
    with memory_mount(place, "tmpfs", name="worn") as worn:
        moved = make_store(place / "store", drives=[worn]).rename(place / "moved")
        shutil.copytree(moved, place / "copy", symlinks=True)
        shutil.rmtree(moved)
        folder = _folder(place, "worn")
        subprocess.run(["mount", "-o", "remount,ro", str(worn)], check=True)
        attach_drives(place / "copy", [folder])
        _assert_step(place / "copy", 1)
        with pytest.raises(RefusedError, match="which is not there now"):
            _go_on(place / "copy", 2)


def test_a_claim_that_is_cut_short_leaves_the_old_label_or_the_new(place: Path) -> None:
    moved = _make(place).rename(place / "moved")
    steps = 0
    while True:
        left = steps

        def cut(action: str, path: Path) -> None:
            nonlocal left
            left -= path.parent.name.startswith("megatrain-") and "drive.json" in path.name
            if left < 0:
                raise OSError(5, "cut")

        before = [(_folder(place, name) / "drive.json").read_bytes() for name in "pq"]
        try:
            with fsops.observed(cut):
                _go_on(moved, 2)
            break
        except StorageError:
            steps += 1
            drives = open_drives(moved, read_root(moved).uuid, read_root(moved).drives)
            after = [drive.label.read_bytes() for drive in drives]
            assert all(owner in (b"/store", b"/moved") for owner in map(_named, after))
            assert verify(moved).ok, before
    assert steps >= 4
    assert not [path for name in "pq" for path in _folder(place, name).glob("drive.json.*")]


def _named(label: bytes) -> bytes:
    return b"/moved" if b'/moved"' in label else b"/store" if b'/store"' in label else label
