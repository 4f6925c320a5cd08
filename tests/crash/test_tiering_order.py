from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiering_stores import (
    RECORDS,
    assert_state,
    content,
    equal_rates,
    fill,
    make_store,
    memory_folder,
    put,
    small_chunks,
)
from tiering import fsops
from tiering.backends.posix import File, PosixBackend
from tiering.copying import Copier
from tiering.drive import Drive
from tiering.drives import create_drive, drop_drive, replace_link
from tiering.errors import StorageError
from tiering.generations import MARKER
from tiering.moving import move_store
from tiering.records import ALIGNMENT
from tiering.slots import Shard
from tiering.store import create_store, open_reader, open_writer


@pytest.fixture(name="store")
def _store() -> Iterator[Path]:
    with small_chunks(), memory_folder() as folder:
        drives = [folder / "a", folder / "b"]
        for drive in drives:
            drive.mkdir()
        yield make_store(folder / "store", drives=drives)


def test_a_commit_makes_bytes_durable_before_names_and_frees_last(store: Path) -> None:
    log: list[tuple[str, str]] = []
    with open_writer(store) as writer, fsops.observed(lambda a, p: log.append((a, p.name))):
        fill(writer, 2)
    order = [
        ("sync", writer.drives[0].folder.name),  # both drives are folders of one file system
        ("fsync", "checksums.bin"),
        ("fsync", "manifest.json"),
        ("fsync folder", "2"),
        ("fsync folder", "manifests"),
        ("fsync", "zarr.json.new"),
        ("rename", "zarr.json"),
        ("fsync folder", "store"),
        ("remove", "manifest.json"),
    ]
    places = [log.index(step) for step in order]
    assert places == sorted(places)


def test_a_slot_stops_being_complete_durably_before_anything_of_it_is_removed(store: Path) -> None:
    log: list[tuple[str, str]] = []
    with open_writer(store) as writer, fsops.observed(lambda a, p: log.append((a, p.name))):
        writer.drop_free_slots()
    first = log.index(("remove", "zarr.json"))
    files = [n for n, (action, name) in enumerate(log) if action == "remove" and name[:2] == "1."]
    assert log[first + 1 : first + 3] == [("open", "1"), ("fsync folder", "1")]
    assert files
    assert first + 2 < min(files)
    assert max(files) < log.index(("remove", "1"))
    assert not (store / "slots" / "1").exists()
    assert not [path for drive in writer.drives for path in drive.folder.glob("1.*")]


def test_a_new_drive_is_found_by_its_link_and_known_by_its_label_after_a_crash(
    store: Path, tmp_path: Path
) -> None:
    log: list[tuple[str, str]] = []
    drive = Drive(number=2, folder=tmp_path / "new", link=str(tmp_path / "new"))
    with fsops.observed(lambda a, p: log.append((a, p.name))):
        create_drive(store, "0" * 32, drive)
    assert [step for step in log if step[0] != "open"] == [
        ("link", "2"),
        ("fsync folder", "drives"),  # first, or nobody finds the folder, and its place is taken
        ("create folder", "new"),
        ("create", "drive.json"),
        ("write", "drive.json"),
        ("fsync", "drive.json"),
        ("fsync folder", "new"),
        ("fsync folder", tmp_path.name),
    ]


def test_a_drive_goes_with_its_label_last_and_before_the_link_to_it(store: Path) -> None:
    log: list[tuple[str, str]] = []
    with open_reader(store) as reader:
        root, drive = reader.root, reader.drives[1]
    for path in drive.folder.iterdir():
        if path != drive.label:
            path.unlink()
    (drive.folder / "drive.json.unfinished").write_text("killed while it was written anew")
    (store / "drives" / "2").symlink_to(drive.folder)
    with fsops.observed(lambda a, p: log.append((a, p.name))):
        drop_drive(store, root.uuid, drive)
        drop_drive(store, root.uuid, replace(drive, number=2))  # a kill came before the first sync
    assert [step for step in log if step[0] != "open"] == [
        ("remove", "drive.json.unfinished"),
        ("remove", "drive.json"),
        ("remove", drive.folder.name),
        ("fsync folder", drive.folder.parent.name),
        ("remove", "1"),
        ("fsync folder", "drives"),
        ("fsync folder", drive.folder.parent.name),
        ("remove", "2"),
        ("fsync folder", "drives"),
    ]


def test_a_link_that_a_kill_left_unfinished_is_in_nobodys_way(store: Path, tmp_path: Path) -> None:
    unfinished = store / "link.new"
    unfinished.symlink_to(tmp_path)
    replace_link(store, store / "drives" / "0", "/elsewhere")
    assert os.readlink(store / "drives" / "0") == "/elsewhere"
    assert not os.path.lexists(unfinished)


def test_a_move_makes_the_visible_root_durable_first_and_removes_what_a_kill_left(
    store: Path, tmp_path: Path
) -> None:
    log: list[tuple[str, str]] = []
    (tmp_path / "c").mkdir()
    (store / "link.new").symlink_to(tmp_path)
    with fsops.observed(lambda a, p: log.append((a, p.name))):
        move_store(store, [tmp_path / "c"], measure=equal_rates)
    first = log.index(("fsync", "zarr.json"))
    assert log[first + 1 : first + 3] == [("open", "store"), ("fsync folder", "store")]
    assert {action for action, _ in log[:first]} <= {"open", "truncate", "write"}  # of the lock
    assert not os.path.lexists(store / "link.new")


def test_a_copy_that_fails_takes_no_room(store: Path, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()

    def observe(action: str, path: Path) -> None:
        if action == "fsync" and path.name.endswith(fsops.UNFINISHED):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(StorageError, match="fsync"), fsops.observed(observe):
        move_store(store, [tmp_path / "c"], measure=equal_rates)
    assert list((tmp_path / "c").glob("*/*")) == list((tmp_path / "c").glob("*/drive.json"))


@pytest.mark.parametrize("page", [0, 1, 2])
def test_no_failed_write_of_a_copy_is_lost_among_those_that_succeed(
    tmp_path: Path, page: int
) -> None:
    class Failing(PosixBackend):
        def write(self, path: File, offset: int, data: memoryview) -> Future[int]:
            if offset != page * ALIGNMENT:
                return super().write(path, offset, data)
            failed: Future[int] = Future()
            failed.set_exception(StorageError("write", tmp_path, errno=errno.EIO, offset=offset))
            return failed

    (tmp_path / "from").write_bytes(os.urandom(4 * ALIGNMENT))
    backends = {
        0: PosixBackend("from", direct=False, writable=False),
        1: Failing("to", direct=False, writable=True),
    }
    source, target = (Shard(drive=n, path=tmp_path / name) for n, name in enumerate(("from", "to")))
    with (
        Copier(backends, memoryview(bytearray(2 * ALIGNMENT))) as copier,
        pytest.raises(StorageError, match="cannot write") as caught,
    ):
        copier.copy(source, target, on_bytes=lambda _: None)
    assert caught.value.offset == page * ALIGNMENT
    for backend in backends.values():
        backend.close()


def test_a_creation_that_is_given_up_is_locked_until_nothing_else_of_it_is_left(
    tmp_path: Path,
) -> None:
    log: list[tuple[str, str]] = []
    with (
        fsops.observed(lambda a, p: log.append((a, p.name))),
        create_store(tmp_path / "store", records=RECORDS[:1], schema_files={}),
    ):
        pass
    assert log[-2:] == [("remove", "LOCK"), ("remove", "store")]
    assert not (tmp_path / "store").exists()


def test_a_creation_whose_lock_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    def observe(action: str, path: Path) -> None:
        if (action, path.name) == ("truncate", "LOCK"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.raises(StorageError, match="truncate"),
        fsops.observed(observe),
        create_store(tmp_path / "store", records=RECORDS[:1], schema_files={}),
    ):
        pass
    assert not (tmp_path / "store").exists()


def test_a_first_commit_in_doubt_is_taken_back_durably_before_what_it_names(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []

    def observe(action: str, path: Path) -> None:
        log.append((action, path.name))
        if action == "fsync folder" and log[-3:-2] == [("rename", "zarr.json")]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        small_chunks(),
        pytest.raises(StorageError, match="fsync folder"),
        fsops.observed(observe),
        create_store(tmp_path / "store", records=RECORDS[:1], schema_files={}) as writer,
    ):
        fill(writer, 1)
    after = log[log.index(("rename", "zarr.json")) + 1 :]
    assert after[:5] == [
        ("open", "store"),
        ("fsync folder", "store"),  # fails
        ("remove", "zarr.json"),
        ("open", "store"),
        ("fsync folder", "store"),
    ]
    assert not (tmp_path / "store").exists()


def test_opening_for_writing_removes_the_mark_of_a_creation_that_was_done(store: Path) -> None:
    mark = store / MARKER
    assert not mark.exists()  # a creation that was not killed removes it
    mark.write_text("killed between the root and the removal of this")
    with open_writer(store):
        assert not mark.exists()


def test_opening_for_writing_makes_the_visible_root_durable_before_it_frees(store: Path) -> None:
    log: list[tuple[str, str]] = []
    (store / "manifests" / "7").mkdir()
    with fsops.observed(lambda a, p: log.append((a, p.name))), open_writer(store):
        pass
    order = [("fsync", "zarr.json"), ("fsync folder", "store"), ("remove", "7")]
    places = [log.index(step) for step in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "action", ["sync", "write", "fsync", "fsync folder", "rename", "create", "create folder"]
)
def test_a_failed_commit_is_not_retried_and_a_new_open_settles_it(store: Path, action: str) -> None:
    calls = []

    def fail(found: str, _path: Path) -> None:
        if found == action:
            calls.append(found)
            raise OSError(errno.EIO, "injected")

    with open_writer(store) as writer:
        slot = writer.begin()
        checksums = {
            r.name: put(writer, slot, r, content(r, 2))
            for r in writer.records.values()
            if not r.shared
        }
        state = {"step": 2, "train_state": {"seed": 2}, "checksums": checksums}
        with fsops.observed(fail), pytest.raises(StorageError) as caught:
            writer.commit(**state)
        assert caught.value.errno == errno.EIO
        assert caught.value.exit_code == 5
        assert len(calls) == 1
        with pytest.raises(StorageError, match="open the store again"):
            writer.commit(**state)
        assert len(calls) == 1
    with open_writer(store) as writer:
        assert writer.manifest.step in (1, 2)
        fill(writer, 3)
    with open_reader(store) as reader:
        assert_state(reader, 3)


def test_a_write_that_fails_ends_the_use_of_the_writer(store: Path) -> None:
    with open_writer(store) as writer:
        slot = writer.begin()
        record = writer.records["u0.master"]
        target = (store / "slots" / str(slot) / "u0.master" / "c" / "0").resolve()
        target.unlink()
        with pytest.raises(StorageError, match=r"cannot open .*u0\.master\.0") as caught:
            put(writer, slot, record, content(record, 2))
        assert caught.value.path == target
        with pytest.raises(StorageError, match="open the store again"):
            writer.commit(step=2, train_state={}, checksums={})
    with open_reader(store) as reader:
        assert_state(reader, 1)
