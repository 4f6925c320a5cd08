"""The files of a slot: a Zarr group whose shards lie on the drives behind relative links."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering import fsops
from tiering.drive import Drive
from tiering.errors import CorruptionError, StorageError
from tiering.fields import shown
from tiering.manifest import digest
from tiering.records import SHARD_NBYTES, Record
from tiering.small_files import kind_of, read_small
from tiering.zarr_documents import array_document, group_document, new_shard

SHARED = "shared"

Places = Mapping[str, tuple[int, ...]]  # record name -> drive number of each shard
OnFault = Callable[[CorruptionError | StorageError], None]


def refuse(fault: CorruptionError | StorageError) -> None:
    """Raise the first fault that is found."""
    raise fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Where one shard lies."""

    drive: int
    path: Path


Locations = Mapping[str, tuple[Shard, ...]]  # record name -> its shards in order


def slot_folder(store: Path, slot: int) -> Path:
    """Return the folder of ``slot``."""
    return store / "slots" / str(slot)


def file_name(slot: int, record: Record, shard: int) -> str:
    """Return the name of a shard's file on its drive."""
    return f"{_shared_prefix(record) if record.shared else slot}.{record.name}.{shard}"


def _shared_prefix(record: Record) -> str:
    """Return what sets files of shared records apart that other slots may have otherwise cut."""
    if record.codec is None and record.shard_nbytes == SHARD_NBYTES:
        return SHARED
    return f"{SHARED}-{record.codec or 'plain'}-{record.shard_nbytes}"


def link_target(drive: int | str, name: str) -> str:
    """Return what the link to the shard file ``name`` says."""
    return f"../../../../drives/{drive}/{name}"


def link_path(store: Path, slot: int, record: str, shard: int) -> Path:
    """Return the link of a slot to one of its shards, which is the shard's key in Zarr."""
    return slot_folder(store, slot) / record / "c" / str(shard)


def metadata_documents(records: Sequence[Record]) -> dict[str, bytes]:
    """Return every metadata file of a new slot, by its path below the slot."""
    arrays = {f"{record.name}/zarr.json": array_document(record) for record in records}
    return {"zarr.json": group_document(), **arrays}


def create_slot(
    store: Path,
    slot: int,
    *,
    records: Sequence[Record],
    documents: Mapping[str, bytes],
    drives: Sequence[Drive],
    places: Places,
) -> None:
    """Create every file of ``slot`` but the last; it reads as zeros.

    Shared records get their files with the first slot and links with every other.
    """
    folder = slot_folder(store, slot)
    by_number = {drive.number: drive for drive in drives}
    fsops.make_dir(folder)
    for record in records:
        array = folder / record.name
        fsops.make_dir(array)
        fsops.make_dir(array / "c")
        fsops.create_file(array / "zarr.json", documents[f"{record.name}/zarr.json"])
        for shard, number in enumerate(places[record.name]):
            name = file_name(slot, record, shard)
            _create_shard(by_number[number].folder / name, record, shard)
            fsops.symlink(link_target(number, name), array / "c" / str(shard))


def finish_slot(store: Path, slot: int, *, documents: Mapping[str, bytes]) -> None:
    """Create the group's metadata of a slot whose other files are durable; so is all of it then.

    A slot without it is not complete, whatever else of it is there.
    """
    folder = slot_folder(store, slot)
    fsops.write_file(folder / "zarr.json", documents["zarr.json"])
    fsops.fsync_dir(folder)


def settle_slot(store: Path, slot: int) -> None:
    """Make durable that a visible slot is complete: a kill may have come before that was."""
    folder = slot_folder(store, slot)
    fsops.fsync_file(folder / "zarr.json")
    fsops.fsync_dir(folder)


def is_present(record: Record, *, drives: Sequence[Drive], places: Places) -> bool:
    """Whether another slot has given a shared record all its files already."""
    by_number = {drive.number: drive for drive in drives}
    return record.shared and all(
        (by_number[number].folder / file_name(0, record, shard)).exists()
        for shard, number in enumerate(places[record.name])
    )


def _create_shard(path: Path, record: Record, shard: int) -> None:
    if not (record.shared and path.exists()):
        fsops.create_sparse(path, *new_shard(record, shard))


def delete_slot(store: Path, slot: int, *, drives: Sequence[Drive]) -> None:
    """Remove every file of ``slot``, finished or not; shared ones only if no other links to it."""
    folder = slot_folder(store, slot)
    if folder.is_dir():
        # First and durably, also if a kill did the first: what a power cut brings back of the rest
        # must not pass for complete.
        fsops.unlink(folder / "zarr.json", missing_ok=True)
        fsops.fsync_dir(folder)
    for drive in drives:
        for path in sorted(drive.folder.glob(f"{slot}.*")):
            fsops.unlink(path)
    fsops.remove_tree(folder)
    shared = [(d.number, path) for d in drives for path in sorted(d.folder.glob(f"{SHARED}*"))]
    linked = _link_targets(store) if shared else frozenset()
    for number, path in shared:
        if link_target(number, path.name) not in linked:
            fsops.unlink(path)


def allocated_nbytes(slot: int, *, drives: Sequence[Drive]) -> int:
    """Return what the files of ``slot`` take up, without those that all slots share."""
    files = (path for drive in drives for path in drive.folder.glob(f"{slot}.*"))
    return sum(512 * path.stat().st_blocks for path in files)


def _link_targets(store: Path) -> frozenset[str]:
    """Return what the links of all slots say."""
    links = (store / "slots").glob("*/*/c/*")
    return frozenset(os.readlink(link) for link in links if link.is_symlink())


def existing_slots(store: Path) -> list[int]:
    """Return the numbers of all slots, finished or not."""
    folder = store / "slots"
    if not folder.is_dir():
        raise CorruptionError(f"{folder}: folder missing")
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def read_metadata(
    store: Path, slot: int, digests: Mapping[str, str], on_fault: OnFault = refuse
) -> dict[str, bytes]:
    """Return every metadata file of ``slot``, none of which changed since the store was made.

    One that did is left out after ``on_fault`` has heard of it.
    """
    folder, found = slot_folder(store, slot), {}
    for name, expected in digests.items():
        try:
            found[name] = _read_checked(folder / name, expected, name.rpartition("/")[0])
        except CorruptionError as fault:
            on_fault(fault)
        except StorageError as error:
            error.record = name.rpartition("/")[0]
            on_fault(error)
    return found


def _read_checked(path: Path, expected: str, record: str) -> bytes:
    try:
        data = read_small(path)
    except FileNotFoundError as error:
        raise CorruptionError(
            f"{path}: metadata is missing, expected sha256 {expected}", file=path, record=record
        ) from error
    found = digest(data)
    if found != expected:
        raise CorruptionError(
            f"{path}: metadata changed: found sha256 {found}, expected {expected}",
            file=path,
            record=record,
        )
    return data


def locate(
    store: Path,
    slot: int,
    *,
    records: Sequence[Record],
    drives: Sequence[Drive],
    lengths: Mapping[str, Sequence[int]],
    on_fault: OnFault = refuse,
) -> Locations:
    """Return where the shards of ``slot`` lie, after checking every link and length.

    ``lengths`` are those of the files of each record; where there are none, any will do. A record
    with a shard that is not there is left out after ``on_fault`` has heard of each.
    """
    found: dict[str, tuple[Shard, ...]] = {}
    for record in records:
        shards = []
        for number in range(record.geometry.shard_count):
            wanted = lengths[record.name][number] if record.name in lengths else None
            try:
                shards.append(_locate_shard(store, slot, record, number, drives, wanted))
            except CorruptionError as fault:
                on_fault(fault)
            except StorageError as error:
                error.record = record.name
                on_fault(error)
        if len(shards) == record.geometry.shard_count:
            found[record.name] = tuple(shards)
    return found


def _locate_shard(
    store: Path, slot: int, record: Record, number: int, drives: Sequence[Drive], nbytes: int | None
) -> Shard:
    link, name = link_path(store, slot, record.name, number), file_name(slot, record, number)
    try:
        target = os.readlink(link)
    except OSError as error:
        raise CorruptionError(
            f"{link}: {error.strerror}, expected a link to shard {name}",
            file=link,
            record=record.name,
        ) from error
    drive = next((d for d in drives if target == link_target(d.number, name)), None)
    if drive is None:
        numbers = ", ".join(str(d.number) for d in drives)
        raise CorruptionError(
            f"{link}: links to {shown(target)}, expected {link_target('N', name)} with N one of "
            f"{numbers}",
            file=link,
            record=record.name,
        )
    elsewhere = _elsewhere(drive, name, drives)
    if elsewhere is not None:
        raise CorruptionError(
            f"{link}: links to drive {drive.number}, but the shard is {elsewhere}",
            file=link,
            record=record.name,
        )
    fault = _wrong_length(drive.folder / name, link, nbytes)
    if fault:
        raise CorruptionError(
            f"drive {drive.number}: shard {drive.folder / name} {fault}",
            file=drive.folder / name,
            drive=drive.number,
            record=record.name,
        )
    return Shard(drive=drive.number, path=drive.folder / name)


def _elsewhere(drive: Drive, name: str, drives: Sequence[Drive]) -> Path | None:
    """Return where a shard is that is not on the drive which its link names."""
    if os.path.lexists(drive.folder / name):
        return None
    paths = (other.folder / name for other in drives if other != drive)
    return next((path for path in paths if os.path.lexists(path)), None)


def _wrong_length(path: Path, link: Path, expected: int | None) -> str:
    """Return what is wrong with a shard's file, short of its content."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        wanted = "" if expected is None else f", expected {expected} B"
        return f"is missing{wanted} (linked from {link})"
    except OSError as error:
        raise StorageError("look at", path, errno=error.errno or 0) from error
    if not stat.S_ISREG(status.st_mode):  # a writer would follow a link, and change what is there
        return f"is {kind_of(status.st_mode)}, expected a file"
    found = status.st_size
    if expected is None or found == expected:
        return ""
    what = "truncated" if found < expected else "too long"
    return f"is {what}: {found} B, expected {expected} B"


def places_of(locations: Locations) -> Places:
    """Return the drive of every shard."""
    return {name: tuple(s.drive for s in shards) for name, shards in locations.items()}
