from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiering_stores import (
    RECORDS,
    assert_state,
    content,
    fill,
    make_store,
    put,
    read_record,
    small_chunks,
    small_record,
)
from tiering import fsops
from tiering.errors import CorruptionError, RefusedError, StorageError
from tiering.records import Record
from tiering.store import create_store, open_reader, open_writer


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_chunks():
        yield


@pytest.fixture(name="drives")
def _drives(tmp_path: Path) -> list[Path]:
    drives = [tmp_path / "first drive", tmp_path / "zweites Läufwerk"]
    for drive in drives:
        drive.mkdir()
    return drives


@pytest.fixture(name="store")
def _store(tmp_path: Path, drives: list[Path]) -> Path:
    return make_store(tmp_path / "store", drives=drives)


# -- round trips -------------------------------------------------------------------------------


def test_a_store_gives_back_what_was_written(store: Path) -> None:
    with open_reader(store) as reader:
        assert_state(reader, 1)
        assert tuple(reader.records.values()) == RECORDS
        assert reader.records["u0.master"].attributes == {"unit": "u0"}
        assert sorted(reader.schema_names()) == ["chat/template.jinja", "schema.json"]
        assert reader.schema_file("chat/template.jinja") == b"\xff\x00"
        with pytest.raises(KeyError):
            reader.schema_file("absent")


def test_a_store_without_drives_can_be_moved(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    moved = tmp_path / "elsewhere"
    store.rename(moved)
    with open_writer(moved) as writer:
        fill(writer, 2)
    with open_reader(moved) as reader:
        assert_state(reader, 2)


def test_records_that_were_never_written_are_zero_and_take_no_space(tmp_path: Path) -> None:
    record = small_record("moments", "float32", 1 << 20)
    with create_store(tmp_path / "s", records=[record], schema_files={}) as writer:
        writer.commit(step=0, train_state={}, checksums={})
    with open_reader(tmp_path / "s") as reader:
        assert not read_record(reader, "moments").any()
        allocated = sum(512 * chunk.path.stat().st_blocks for chunk in reader.chunks("moments"))
        assert allocated < record.nbytes // 2


def test_chunks_say_where_every_byte_lies(store: Path) -> None:
    from tiering.checksum import crc32c

    with open_reader(store) as reader:
        for name, record in reader.records.items():
            found = b""
            for chunk in reader.chunks(name):
                with chunk.path.open("rb") as file:
                    file.seek(chunk.offset)
                    data = file.read(chunk.nbytes)
                assert crc32c(data) == chunk.crc
                found += data
            assert found == content(record, 1).tobytes()


def test_the_padding_of_a_record_is_written_as_zeros_whatever_the_buffer_holds(
    store: Path,
) -> None:
    with open_writer(store) as writer:
        slot = writer.begin()
        record = writer.records["tiny"]
        dirty = memoryview(np.full(8193, 0xEE, np.uint8))[1:]  # not aligned: goes by way of a copy
        writer.write(slot, "even", 0, dirty)
        writer.write(slot, "tiny", 0, dirty[: record.padded_nbytes])
        out = np.zeros(record.padded_nbytes, np.uint8)
        writer.read(slot, "tiny", 0, memoryview(out))
    assert out[0] == 0xEE
    assert not out[1:].any()


def test_every_slot_holds_a_shared_record(store: Path) -> None:
    with open_writer(store) as writer:
        writer.ensure_slots(3)
        for seed in (2, 3, 4):
            fill(writer, seed, retain=2)
        slot = writer.begin()
        with pytest.raises(ValueError, match="carried is shared by all slots"):
            writer.write(slot, "carried", 0, memoryview(bytes(308)))
    shards = {p.resolve() for p in (store / "slots").glob("*/carried/c/0")}
    assert len(shards) == 1


def test_retained_generations_can_be_read_and_dropped_ones_cannot(store: Path) -> None:
    with open_writer(store) as writer:
        writer.ensure_slots(3)
        for seed in (2, 3):
            fill(writer, seed, retain=2)
    with open_reader(store, generation=2) as reader:
        assert_state(reader, 2)
    with pytest.raises(RefusedError, match=r"no generation 1; there is 2 \(step 2\), 3 \(step 3\)"):
        open_reader(store, generation=1)


# -- refusals of the writer ----------------------------------------------------------------------


def test_a_step_that_did_not_write_everything_is_not_committed(store: Path) -> None:
    with open_writer(store) as writer:
        slot = writer.begin()
        checksums = {}
        for record in writer.records.values():
            if not record.shared:
                checksums[record.name] = put(writer, slot, record, content(record, 2))
        writer.commit(step=2, train_state={}, checksums=checksums)
        slot = writer.begin()
        put(writer, slot, writer.records["tiny"], content(writer.records["tiny"], 3))
        with pytest.raises(ValueError, match=r"u0\.weights: 0 of 24776 B were written to slot 0"):
            writer.commit(step=3, train_state={}, checksums=checksums)
    with open_reader(store) as reader:
        assert reader.manifest.step == 2


def test_checksums_must_be_there_for_every_chunk(store: Path) -> None:
    with open_writer(store) as writer:
        slot = writer.begin()
        for record in writer.records.values():
            if not record.shared:
                put(writer, slot, record, content(record, 2))
        with pytest.raises(ValueError, match=r"u0\.weights: none checksums for 4 chunks"):
            writer.commit(step=2, train_state={}, checksums={})


@pytest.mark.parametrize(("offset", "nbytes"), [(1, 4096), (0, 100), (4096, 5000)])
def test_a_write_that_is_not_aligned_is_refused(store: Path, offset: int, nbytes: int) -> None:
    with open_writer(store) as writer:
        slot = writer.begin()
        with pytest.raises(ValueError, match="neither multiples of 4096"):
            writer.write(slot, "u0.master", offset, memoryview(bytes(nbytes)))


def test_what_reaches_past_a_record_is_refused(store: Path) -> None:
    with open_writer(store) as writer:
        slot = writer.begin()
        with pytest.raises(ValueError, match="tiny: 8192 B at offset 0 reach past its 4096 B"):
            writer.write(slot, "tiny", 0, memoryview(bytes(8192)))
        with pytest.raises(ValueError, match="reach past"):
            writer.read(slot, "tiny", 4096, memoryview(bytearray(1)))
        with pytest.raises(ValueError, match="slot 0 is not the working slot"):
            writer.write(0, "tiny", 0, memoryview(b"x"))


def test_one_slot_leaves_nowhere_to_write(tmp_path: Path) -> None:
    store = make_store(tmp_path / "one", slots=1)
    with open_writer(store) as writer, pytest.raises(RefusedError, match="1 slots and 1 retained"):
        writer.begin(wait_s=0)


# -- damage --------------------------------------------------------------------------------------


def _shard(store: Path, name: str = "u0.master", index: int = 1) -> Path:
    return (store / "slots" / "0" / name / "c" / str(index)).resolve()


def _drive(store: Path, number: int) -> Path:
    return (store / "drives" / str(number)).resolve()


def _edit_json(path: Path, edit: Callable[[dict], object]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def _swap(path: Path) -> None:
    other = path.parent / "2"
    target, other_target = os.readlink(path), os.readlink(other)
    path.unlink()
    other.unlink()
    path.symlink_to(other_target)
    other.symlink_to(target)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (
        lambda s: _shard(s).unlink(),
        r"drive \d: shard .*0\.u0\.master\.1 is missing, expected 32804 B",
    ),
    "shard short": (
        lambda s: os.truncate(_shard(s), 4096),
        r"drive \d: shard .*0\.u0\.master\.1 is truncated: 4096 B, expected 32804 B",
    ),
    "shard empty": (lambda s: os.truncate(_shard(s), 0), "truncated: 0 B, expected 32804 B"),
    "shard long": (
        lambda s: os.truncate(_shard(s), 99999),
        "too long: 99999 B, expected 32804 B",
    ),
    "link missing": (
        lambda s: (s / "slots/0/u0.master/c/1").unlink(),
        r"slots/0/u0\.master/c/1: No such file .* expected a link to shard 0\.u0\.master\.1",
    ),
    "link replaced by a file": (
        lambda s: shutil.copy(_shard(s), s / "x") and os.replace(s / "x", s / "slots/0/even/c/0"),
        r"slots/0/even/c/0: Invalid argument, expected a link",
    ),
    "links swapped": (lambda s: _swap(s / "slots/0/u0.master/c/1"), r"links to .*master\.2"),
    "array metadata changed": (
        lambda s: _edit_json(s / "slots/0/even/zarr.json", lambda d: d.update(shape=[5])),
        r"slots/0/even/zarr\.json: metadata changed: found sha256 .*, expected ",
    ),
    "array metadata missing": (
        lambda s: (s / "slots/0/even/zarr.json").unlink(),
        r"slots/0/even/zarr\.json: metadata is missing",
    ),
    "drive missing": (
        lambda s: shutil.rmtree(_drive(s, 1)),
        r"drive 1: folder .*zweites Läufwerk/megatrain-.* is missing; is its file system mounted",
    ),
    "drive empty": (
        lambda s: [path.unlink() for path in _drive(s, 1).iterdir()],
        r"drive 1: folder .* is empty; is its file system mounted",
    ),
    "drive without label": (
        lambda s: (_drive(s, 0) / "drive.json").unlink(),
        r"drive 0: folder .* has no drive\.json",
    ),
    "drive of another store": (
        lambda s: _edit_json(_drive(s, 0) / "drive.json", lambda d: d.update(uuid="f" * 32)),
        r"drive\.json: belongs to drive 0 of store f{32}, expected drive 0 of store ",
    ),
    "drives exchanged": (
        lambda s: _edit_json(_drive(s, 0) / "drive.json", lambda d: d.update(drive=1)),
        r"belongs to drive 1 of store .*, expected drive 0",
    ),
    "drive link missing": (lambda s: (s / "drives/1").unlink(), r"drive 1: .*drives/1 is no link"),
    "manifest missing": (
        lambda s: (s / "manifests/1/manifest.json").unlink(),
        r"manifests/1/manifest\.json: missing, though .*zarr\.json lists it|root lists",
    ),
    "manifest changed": (
        lambda s: _edit_json(s / "manifests/1/manifest.json", lambda d: d.update(step=9)),
        r"manifests/1/manifest\.json: found sha256 .*, the root names ",
    ),
    "table changed": (
        lambda s: os.truncate(s / "manifests/1/checksums.bin", 8),
        r"checksums\.bin: sha256 is",
    ),
    "root torn": (lambda s: os.truncate(s / "zarr.json", 50), r"zarr\.json: no valid JSON"),
    "root empty": (lambda s: os.truncate(s / "zarr.json", 0), r"zarr\.json: no valid JSON"),
    "root of a newer format": (
        lambda s: _edit_json(
            s / "zarr.json", lambda d: d["attributes"]["megatrain"].update(format=2)
        ),
        "format 2, this program reads up to format 1",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_and_named_whoever_opens(store: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    damage(store)
    before = sorted(store.parent.rglob("*"))
    descriptors = len(os.listdir("/proc/self/fd"))
    for door in (open_reader, open_writer):
        with pytest.raises(RefusedError, match=message) as caught:
            door(store)
        assert caught.value.exit_code == 3
    assert sorted(store.parent.rglob("*")) == before, "something was created or removed"
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_opening_reads_no_bulk_data(tmp_path: Path) -> None:
    record = small_record("big", "float32", 4 << 20)
    store = make_store(tmp_path / "big", records=[record])
    for door in (open_reader, open_writer):
        before = _bytes_read()
        door(store).close()
        assert _bytes_read() - before < 1 << 20


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_changed_schema_file_is_refused(store: Path) -> None:
    [path] = (store / "schema").glob("*/schema.json")
    path.write_bytes(b"{} ")
    with (
        open_reader(store) as reader,
        pytest.raises(CorruptionError, match=r"schema\.json: found sha256"),
    ):
        reader.schema_file("schema.json")


def test_a_root_that_is_no_file_is_refused(store: Path) -> None:
    (store / "zarr.json").unlink()
    (store / "zarr.json").mkdir()
    for door in (open_reader, open_writer):
        with pytest.raises(CorruptionError, match=r"zarr\.json: is a folder, expected a file"):
            door(store)


def test_what_is_no_store_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "absent": "does not exist",
        "file": "is no folder",
        "empty": r"has no zarr\.json",
    }.items():
        for door in (open_reader, open_writer):
            with pytest.raises(RefusedError, match=message):
                door(tmp_path / name)
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("ensured", [True, False])
def test_a_damaged_free_slot_is_repaired_when_it_is_needed(store: Path, ensured: bool) -> None:
    (store / "slots/1/even/c/0").resolve().unlink()
    with open_writer(store) as writer:
        assert writer.slots == {0}
        if ensured:
            writer.ensure_slots(2)
        fill(writer, 2)
    with open_reader(store) as reader:
        assert_state(reader, 2)


# -- creation ------------------------------------------------------------------------------------


def _create(path: Path, **options: object) -> None:
    with create_store(path, records=RECORDS, schema_files={}, **options) as writer:  # type: ignore[arg-type]
        fill(writer, 1)


def _create_and_fail(path: Path, *, commit: bool, drives: Sequence[Path] = ()) -> None:
    with create_store(path, records=RECORDS, schema_files={}, drives=drives) as writer:
        writer.write(0, "even", 0, memoryview(bytes(4096)))
        if commit:
            fill(writer, 1)
        raise ZeroDivisionError


def test_an_exception_leaves_nothing_behind(tmp_path: Path, drives: list[Path]) -> None:
    with pytest.raises(ZeroDivisionError):
        _create_and_fail(tmp_path / "s", commit=False, drives=drives)
    assert sorted(tmp_path.rglob("*")) == sorted(drives)


def test_leaving_without_a_commit_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with create_store(tmp_path / "s", records=RECORDS, schema_files={}):
        pass
    assert list((tmp_path / "s").iterdir()) == []


def test_an_exception_after_the_commit_keeps_the_store(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        _create_and_fail(tmp_path / "s", commit=True)
    with open_reader(tmp_path / "s") as reader:
        assert_state(reader, 1)


def test_a_store_or_a_foreign_folder_is_never_overwritten(tmp_path: Path, store: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "0.bin").write_bytes(b"\xff" * 10)
    marked = tmp_path / "marked"
    shutil.copytree(foreign, marked)
    (marked / "CREATING").write_text("notes of somebody")
    for path, message in {
        store: "is a store or a Zarr group already",
        foreign: r"not empty, it holds '0\.bin'",
        marked: "not empty",
        foreign / "0.bin": "is no folder",
        tmp_path / "no" / "parent": "does not exist",
    }.items():
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(RefusedError, match=message):
            _create(path)
        assert sorted(tmp_path.rglob("*")) == before
    with open_reader(store) as reader:
        assert_state(reader, 1)


def test_nothing_is_created_in_a_drive_that_is_missing(tmp_path: Path, drives: list[Path]) -> None:
    missing = tmp_path / "not mounted"
    with pytest.raises(RefusedError, match="not mounted: no such folder"):
        _create(tmp_path / "s", drives=[drives[0], missing])
    assert not missing.exists()
    assert not (tmp_path / "s").exists()
    assert list(drives[0].iterdir()) == []


def test_a_drive_given_twice_is_refused(tmp_path: Path, drives: list[Path]) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(drives[0])
    with pytest.raises(RefusedError, match="given twice"):
        _create(tmp_path / "s", drives=[drives[0], alias])


def test_two_stores_share_drives_without_meeting(tmp_path: Path, drives: list[Path]) -> None:
    for seed in (1, 2):
        make_store(tmp_path / f"s{seed}", drives=drives, seed=seed)
    for seed in (1, 2):
        with open_reader(tmp_path / f"s{seed}") as reader:
            assert_state(reader, seed)


@pytest.mark.parametrize("name", ["", "../up", "/abs", "a//b", "a/../b"])
def test_a_schema_file_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(ValueError, match="not a plain relative path"),
        create_store(tmp_path / "s", records=RECORDS, schema_files={name: b""}),
    ):
        pass
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a b", ".hidden", "x" * 201])
def test_a_record_has_a_name_that_is_a_file_name(name: str) -> None:
    with pytest.raises(ValueError, match="record"):
        Record(name=name, dtype="float32", length=1)


@pytest.mark.parametrize("number", [1, 2, 5, 20])
def test_a_full_drive_while_creating_leaves_nothing_behind(
    tmp_path: Path, drives: list[Path], number: int
) -> None:
    calls = 0

    def full(action: str, _path: Path) -> None:
        nonlocal calls
        calls += action == "write"
        if calls == number and action == "write":
            raise OSError(errno.ENOSPC, "injected")

    with fsops.observed(full), pytest.raises(StorageError, match="No space left on device"):
        _create(tmp_path / "s", drives=drives)
    assert sorted(tmp_path.rglob("*")) == sorted(drives)
