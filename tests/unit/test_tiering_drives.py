from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.loops import memory_mount
from tests.support.tiering_stores import (
    assert_state,
    equal_rates,
    fill,
    make_store,
    memory_folder,
    small_chunks,
    small_record,
)
from tiering import bandwidth, fsops, lock
from tiering.attaching import attach_drives
from tiering.bandwidth import Rates
from tiering.errors import CapacityError, CorruptionError, LockedError, RefusedError, StorageError
from tiering.moving import Moved, move_store
from tiering.store import create_store, open_reader, open_writer

NAMES = "pqr"


@pytest.fixture(name="place")
def _place() -> Iterator[Path]:
    """Lend a folder with three folders for drives."""
    with small_chunks(), memory_folder() as folder:
        for name in NAMES:
            (folder / name).mkdir()
        yield folder


def _folders(place: Path, names: str) -> list[Path]:
    return [place / name for name in names]


def _make(place: Path, names: str) -> Path:
    return make_store(place / "store", drives=_folders(place, names))


def _move(place: Path, names: str) -> Moved:
    return move_store(place / "store", _folders(place, names), measure=equal_rates)


def _holds(place: Path) -> str:
    """Return the names of the folders that hold a drive."""
    return "".join(name for name in NAMES if list((place / name).iterdir()))


def _everything(place: Path) -> list[tuple[str, bytes]]:
    """Return every name with its content or target."""
    return [
        (str(p), os.readlink(p).encode() if p.is_symlink() else p.read_bytes())
        for p in sorted(place.rglob("*"))
        if (p.is_symlink() or p.is_file()) and p.name != "LOCK"
    ]


# -- shares ------------------------------------------------------------------------------------


def test_shares_are_measured_at_creation_stored_in_the_root_and_said(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rates = {"p": Rates(read_bytes_per_s=3e9, written_bytes_per_s=3e9)}
    slower = Rates(read_bytes_per_s=2e9, written_bytes_per_s=2e9 / 3)  # 1 GB/s of the mix
    caplog.set_level(logging.INFO, "tiering.bandwidth")
    records = [small_record(f"r{i}", "float32", 20_000) for i in range(12)]
    with create_store(
        place / "store",
        records=records,
        schema_files={},
        drives=_folders(place, "pq"),
        measure=lambda folder: rates.get(folder.name, slower),
    ) as writer:
        fill(writer, 1)
    root = json.loads((place / "store/zarr.json").read_text())["attributes"]["megatrain"]
    assert root["drives"] == [{"drive": 0, "share": 0.75}, {"drive": 1, "share": 0.25}]
    said = [message for message in caplog.messages if "takes" in message]
    assert "p/megatrain-" in said[0]
    assert "reads 3.00 GB/s, writes 3.00 GB/s, takes 75.0 % of the bytes" in said[0]
    assert "reads 2.00 GB/s, writes 0.67 GB/s, takes 25.0 % of the bytes" in said[1]
    with open_reader(place / "store") as reader:
        nbytes = [0, 0]
        for path in {(c.drive, c.path) for name in reader.records for c in reader.chunks(name)}:
            nbytes[path[0]] += path[1].stat().st_size
    assert nbytes[0] / sum(nbytes) == pytest.approx(0.75, rel=0.1)


def test_one_drive_is_not_measured(place: Path) -> None:
    def never(folder: Path) -> Rates:
        raise AssertionError(folder)

    with create_store(
        place / "store",
        records=[small_record("a", "uint8", 1)],
        schema_files={},
        drives=_folders(place, "p"),
        measure=never,
    ) as writer:
        fill(writer, 1)
    move_store(place / "store", _folders(place, "q"), measure=never)
    with open_reader(place / "store") as reader:
        assert reader.root.drives == {1: 1.0}


def test_a_measurement_leaves_nothing_behind_and_ends_a_creation_that_it_fails(
    tmp_path: Path,
) -> None:
    rates = bandwidth.measure(tmp_path, nbytes=1 << 20)
    assert rates.read_bytes_per_s > 0
    assert rates.written_bytes_per_s > 0
    assert not list(tmp_path.iterdir())

    def broken(folder: Path) -> Rates:
        raise StorageError("measure", folder, errno=5)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(StorageError, match="cannot measure"):  # noqa: SIM117
        with create_store(
            tmp_path / "s",
            records=[small_record("a", "uint8", 1)],
            schema_files={},
            drives=[tmp_path / "a", tmp_path / "b"],
            measure=broken,
        ):
            pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b"]


# -- drives that are not there -------------------------------------------------------------------


@pytest.mark.parametrize("state", ["is missing", "is empty"])
def test_a_drive_that_is_not_there_is_named_with_the_records_that_need_it(
    place: Path, state: str
) -> None:
    records = [small_record(f"layer.{i:03}.weights", "bfloat16", 20_000) for i in range(8)]
    store = make_store(place / "store", records=records, drives=_folders(place, "pq"))
    [folder] = (place / "q").iterdir()
    shutil.rmtree(folder)
    if state == "is empty":
        folder.mkdir()
    for door in (open_reader, open_writer):
        with pytest.raises(CorruptionError) as caught:
            door(store)
        message = str(caught.value)
        assert f"drive 1: folder {folder} {state}; is its file system mounted?" in message
        named = ", ".join(f"layer.{i:03}.weights" for i in range(3))
        assert f"8 records need it ({named} and 5 more)" in message
        assert "megatrain-ckpt attach" in message
    assert not folder.exists() or not list(folder.iterdir()), "nothing is created on it"


# -- moving ------------------------------------------------------------------------------------


def test_a_store_goes_to_other_drives_and_back_with_every_byte(place: Path) -> None:
    store = _make(place, "")
    with open_writer(store) as writer:
        writer.ensure_slots(3)
        fill(writer, 2, retain=2)
    for names in ("pqr", "q", "qr"):
        moved = _move(place, names)
        assert sorted(drive.folder.parent.name for drive in moved.drives) == list(names)
        assert _holds(place) == names
        assert moved.files > 0
        for seed in (1, 2):
            with open_reader(store, generation=seed) as reader:
                assert_state(reader, seed)
    moved = move_store(store, [store], measure=equal_rates)
    assert _holds(place) == ""
    assert [drive.link for drive in moved.drives] == ["../shards"]
    assert store.rename(place / "elsewhere").is_dir()
    with open_writer(place / "elsewhere") as writer:
        fill(writer, 3)
    with open_reader(place / "elsewhere") as reader:
        assert_state(reader, 3)


def test_both_slots_of_a_shard_stay_on_one_drive(place: Path) -> None:
    store = _make(place, "p")
    _move(place, "pqr")
    places = [
        {str(link.relative_to(store / f"slots/{slot}")): os.readlink(link).split("/")[-2]
         for link in (store / f"slots/{slot}").glob("*/c/*")}
        for slot in (0, 1)
    ]  # fmt: skip
    assert places[0] == places[1]
    assert len(set(places[0].values())) == 3


def test_a_second_move_to_the_same_drives_moves_nothing(place: Path) -> None:
    _make(place, "p")
    assert _move(place, "pqr").files > 0
    before = _everything(place)
    assert _move(place, "pqr").files == 0
    assert _everything(place) == before


def test_drives_that_stay_keep_what_their_share_allows(place: Path) -> None:
    records = [small_record(f"r{i}", "float32", 8192) for i in range(40)]
    make_store(place / "store", records=records, drives=_folders(place, "pq"))
    moved = _move(place, "pqr")
    assert moved.files == pytest.approx(2 * 40 / 3, abs=6)


def test_a_drive_is_named_by_its_folder_or_by_the_one_above(place: Path) -> None:
    _make(place, "pq")
    [folder] = (place / "p").iterdir()
    moved = move_store(place / "store", [folder, place / "q"], measure=equal_rates)
    assert moved.files == 0
    with pytest.raises(RefusedError, match="given twice"):
        move_store(place / "store", [folder, place / "p"], measure=equal_rates)


def test_what_cannot_be_a_drive_is_refused_and_nothing_changes(place: Path) -> None:
    store = _make(place, "p")
    before = _everything(place)
    [folder] = (place / "p").iterdir()
    (place / "r" / folder.name).mkdir()
    for folders, message in {
        (place / "absent",): "absent: no such folder; nothing is created there",
        (place / "q", place / "q"): "given twice",
        (place / "r",): r"r/megatrain-\w+: exists and is no drive of",
    }.items():
        with pytest.raises(RefusedError, match=message):
            move_store(store, folders, measure=equal_rates)
    assert _everything(place) == before


@pytest.mark.root
def test_too_little_room_is_refused_with_a_table_before_anything_changes(
    place: Path, tmp_path: Path
) -> None:
    store = _make(place, "p")
    before = _everything(place)
    with memory_mount(tmp_path, "tmpfs", nbytes=24 << 10) as small:
        with pytest.raises(CapacityError) as caught:
            move_store(store, [small], measure=equal_rates)
        lines = str(caught.value).splitlines()
        assert lines[0] == "drive 1 full: the shards do not fit"
        assert lines[1].split() == ["drive", "need", "B", "free", "B", "folder"]
        assert [line.split()[0] for line in lines[2:]] == ["0", "1"]
        _, need, free, _ = lines[3].split()
        assert int(need) > 24 << 10 >= int(free)
        assert str(small) in lines[3]
        assert not list(small.iterdir())
    assert _everything(place) == before


def test_holes_stay_holes_and_reserved_blocks_stay_reserved(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
    records = [small_record("moments", "float32", 1 << 20), small_record("a", "float32", 8192)]
    with create_store(
        tmp_path / "store", records=records, schema_files={}, drives=[tmp_path / "p"], slots=2
    ) as writer:
        data = memoryview(b"x" * 32768)
        writer.write(0, "a", 0, data)
        from tiering.checksum import ChunkCrc

        crc = ChunkCrc(records[1])
        crc.feed(0, data)
        writer.commit(step=0, train_state={}, checksums={"a": crc.table()})
    _move(tmp_path, "q")
    assert _allocated(tmp_path / "q") < 1 << 20
    with open_writer(tmp_path / "store") as writer:
        writer.reserve()
    reserved = _allocated(tmp_path / "q")
    assert reserved >= 2 * 4 << 20
    _move(tmp_path, "r")
    assert _allocated(tmp_path / "r") == pytest.approx(reserved, rel=0.02)
    with open_reader(tmp_path / "store") as reader:
        out = bytearray(32768)
        reader.read("a", 0, memoryview(out))
        assert out == data


def _allocated(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def test_progress_ends_at_the_total(place: Path) -> None:
    store = _make(place, "")
    seen: list[tuple[int, int]] = []
    move_store(
        store,
        _folders(place, "pq"),
        measure=equal_rates,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1] > 0


def test_files_of_others_in_a_drive_that_is_left_are_kept(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _make(place, "p")
    [folder] = (place / "p").iterdir()
    (folder / "notes.txt").write_text("mine")
    _move(place, "q")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert "not removed, it holds notes.txt" in caplog.text


def test_a_copy_that_fails_leaves_the_store_and_no_remains(place: Path) -> None:
    store = _make(place, "p")

    def fail(action: str, path: Path) -> None:
        if action == "fsync" and path.name.startswith("1.") and path.is_relative_to(place / "q"):
            raise OSError(28, "injected")

    with fsops.observed(fail), pytest.raises(StorageError, match="No space left on device"):
        _move(place, "q")
    assert not list((place / "q").rglob(f"*{fsops.UNFINISHED}"))
    with open_reader(store) as reader:
        assert_state(reader, 1)
    _move(place, "q")
    assert _holds(place) == "q"


# -- who else has it -----------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [False, True])
def test_a_store_that_is_read_is_not_moved_and_the_readers_are_named(
    place: Path, dropped: bool
) -> None:
    store = _make(place, "p")
    with open_reader(store) as reader:
        if dropped:
            with open_writer(store) as writer:
                fill(writer, 2)
        before = _everything(place)
        with pytest.raises(LockedError, match=f"is being read by pid {os.getpid()};") as caught:
            _move(place, "q")
        assert caught.value.exit_code == 4
        assert _everything(place) == before
        assert_state(reader, 1)
    _move(place, "q")


def test_a_store_that_is_written_is_not_moved(place: Path) -> None:
    with open_writer(_make(place, "p")), pytest.raises(LockedError, match="in use by pid"):
        _move(place, "q")


READ = """
import sys
from tiering.store import open_reader
from tiering import lock
lock._HOLD_TRIES = 3
open_reader(sys.argv[1])
"""


def test_a_reader_that_comes_during_a_move_is_told_so(place: Path) -> None:
    store = _make(place, "p")
    told: list[str] = []

    def read(action: str, path: Path) -> None:
        if action == "rename" and not told:
            done = subprocess.run(
                [sys.executable, "-c", READ, str(store)], capture_output=True, text=True
            )
            told.append(done.stderr)

    with fsops.observed(read):
        _move(place, "q")
    assert f"is locked by pid {os.getpid()}: the shards of the store are being moved" in told[0]
    assert "LockedError" in told[0]
    open_reader(store).close()


def test_a_reader_waits_for_a_move_that_ends_soon(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root and the places that it reads are those from after the move."""
    store = _make(place, "p")
    original = lock.hold
    moves = ["q"]

    def hold_late(path: Path) -> int | None:
        while moves:
            _move(place, moves.pop())
        return original(path)

    monkeypatch.setattr(lock, "hold", hold_late)
    with open_reader(store) as reader:
        assert [drive.folder.parent.name for drive in reader.drives] == ["q"]
        assert_state(reader, 1)


# -- attaching -----------------------------------------------------------------------------------


def test_drives_that_were_moved_are_attached_again(place: Path) -> None:
    store = _make(place, "pq")
    for name in "pq":
        [folder] = (place / name).iterdir()
        folder.rename(place / f"r/{name}")
    with pytest.raises(CorruptionError, match="megatrain-ckpt attach"):
        open_reader(store)
    attached = attach_drives(store, [place / "r/q", place / "r/p"])
    assert [drive.number for drive in attached] == [1, 0]
    with open_writer(store) as writer:
        fill(writer, 2)
    with open_reader(store) as reader:
        assert_state(reader, 2)


def test_the_folder_above_a_drive_will_do_if_it_holds_no_other_of_the_store(place: Path) -> None:
    store = _make(place, "pq")
    other = make_store(place / "other", drives=_folders(place, "r"))
    [folder] = (place / "p").iterdir()
    folder.rename(place / "r/anything")
    attach_drives(store, [place / "r"])
    open_reader(store).close()
    [second] = (place / "q").iterdir()
    second.rename(place / "r/more")
    with pytest.raises(RefusedError, match="drives 0, 1 are there; name one's folder"):
        attach_drives(store, [place / "r"])
    attach_drives(store, [place / "r/more"])
    open_reader(other).close()


def test_one_drive_of_several_is_attached_and_the_next_that_is_missing_is_named(
    place: Path,
) -> None:
    store = _make(place, "pq")
    for name in "pq":
        (place / name).rename(place / f"moved {name}")
    with pytest.raises(CorruptionError, match=r"drive 1: folder .* is missing"):
        attach_drives(store, [place / "moved p"])
    attach_drives(store, [place / "moved q"])
    open_reader(store).close()


def test_what_is_no_drive_of_the_store_is_refused_and_nothing_changes(place: Path) -> None:
    store = _make(place, "p")
    other = make_store(place / "other", drives=_folders(place, "q"))
    with open_reader(other) as reader:
        uuid = reader.root.uuid
    copy = shutil.copytree(next((place / "p").iterdir()), place / "copy")
    (copy / "drive.json").write_text((copy / "drive.json").read_text().replace(": 0", ": 7"))
    short = shutil.copytree(next((place / "p").iterdir()), place / "short")
    os.truncate(short / "0.u0.master.1", 4096)
    before = _everything(place)
    for folders, message in {
        (place / "q",): rf"drive\.json: drive 0 of store {uuid}, not of .*/store",
        (place / "r",): r"r: no drive\.json there, nor in a folder inside it",
        (place / "absent",): "absent: no such folder",
        (place / "p", place / "p"): "drives given twice: 0, 0",
        (copy,): r"copy/drive\.json: drive 7, but .*/store has 0",
        (short,): r"shard .*short/0\.u0\.master\.1 is truncated: 4096 B",
    }.items():
        with pytest.raises(RefusedError, match=message):
            attach_drives(store, folders)
    assert _everything(place) == before


def test_the_link_is_replaced_in_one_step_and_durable(place: Path) -> None:
    store = _make(place, "p")
    [folder] = (place / "p").iterdir()
    folder.rename(place / "q/moved")
    log: list[tuple[str, str]] = []
    with fsops.observed(lambda action, path: log.append((action, path.name))):
        attach_drives(store, [place / "q"])
    steps = [("link", "link.new"), ("rename", "0"), ("fsync folder", "drives")]
    assert [entry for entry in log if entry in steps] == steps


def test_a_store_that_is_written_is_not_attached_to(place: Path) -> None:
    store = _make(place, "p")
    with open_writer(store), pytest.raises(LockedError, match="in use by pid"):
        attach_drives(store, [place / "p"])
