"""The drives of a store: one folder on one file system each, reached through one link."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tiering import fsops
from tiering.errors import CorruptionError, RefusedError, StorageError
from tiering.manifest import FORMAT, encode_json, parse_object

COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs", "nilfs2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """Where the shard files of drive ``number`` lie; ``link`` is what the store's link says."""

    number: int
    folder: Path
    link: str

    @property
    def label(self) -> Path:
        """The file that says which store and which drive the folder belongs to."""
        return self.folder / "drive.json"

    def free_nbytes(self) -> int:
        """Return what an unprivileged process may still write here."""
        status = os.statvfs(self.folder)
        if not status.f_blocks:  # a ramfs has no size of its own: it takes what memory is left
            return int(psutil.virtual_memory().available)
        return status.f_bavail * status.f_frsize


def plan_drives(store: Path, uuid: str, parents: Sequence[Path]) -> tuple[Drive, ...]:
    """Return the drives that a new store would have; creates nothing.

    Raises:
        RefusedError: A parent is no folder (a file system that is not mounted?) or comes twice.
    """
    if not parents:
        return (Drive(number=0, folder=store / "shards", link="../shards"),)
    folders = [Path(os.path.abspath(parent)) for parent in parents]
    for folder in folders:
        if not folder.is_dir():
            raise RefusedError(f"drive {folder}: no such folder; nothing is created there")
        if sum(other.samefile(folder) for other in folders if other.is_dir()) > 1:
            raise RefusedError(f"drive {folder}: given twice")
    name = f"megatrain-{uuid[:8]}"
    return tuple(
        Drive(number=number, folder=folder / name, link=str(folder / name))
        for number, folder in enumerate(folders)
    )


def create_drive(store: Path, uuid: str, drive: Drive) -> None:
    """Create the folder of ``drive`` with its label, and the store's link to it; durable."""
    fsops.make_dir(drive.folder)
    document = {"format": FORMAT, "uuid": uuid, "drive": drive.number}
    fsops.write_file(drive.label, encode_json(document))
    fsops.fsync_dir(drive.folder)
    fsops.fsync_dir(drive.folder.parent)
    fsops.symlink(drive.link, store / "drives" / str(drive.number))


def open_drives(store: Path, uuid: str, count: int) -> tuple[Drive, ...]:
    """Return the drives of a store after checking that each is there and is its own."""
    drives = tuple(_resolve(store, number) for number in range(count))
    for drive in drives:
        _check_label(drive, uuid)
    return drives


def _resolve(store: Path, number: int) -> Drive:
    link = store / "drives" / str(number)
    try:
        target = os.readlink(link)
    except OSError as error:
        raise CorruptionError(f"drive {number}: {link} is no link: {error.strerror}") from error
    folder = Path(os.path.normpath(link.parent / target))
    if not folder.is_dir():
        raise CorruptionError(
            f"drive {number}: folder {folder} is missing; is its file system mounted? "
            f"The link is {link}"
        )
    return Drive(number=number, folder=folder, link=target)


def _check_label(drive: Drive, uuid: str) -> None:
    try:
        data = drive.label.read_bytes()
    except FileNotFoundError as error:
        state = "has no drive.json" if any(drive.folder.iterdir()) else "is empty"
        raise CorruptionError(
            f"drive {drive.number}: folder {drive.folder} {state}; is its file system mounted?"
        ) from error
    except OSError as error:
        raise StorageError("read", drive.label, errno=error.errno or errno.EIO) from error
    label = parse_object(data, drive.label)
    found = (label.get("uuid"), label.get("drive"))
    if found != (uuid, drive.number):
        raise CorruptionError(
            f"{drive.label}: belongs to drive {found[1]} of store {found[0]}, expected "
            f"drive {drive.number} of store {uuid}"
        )


def is_copy_on_write(drive: Drive) -> bool:
    """Whether overwriting reserved blocks may still need new ones on this drive."""
    return fsops.filesystem_type(drive.folder) in COPY_ON_WRITE
