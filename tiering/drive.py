"""A drive of a store: one folder on one file system, reached through one link."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from tiering import fsops
from tiering.labels import LABEL

COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs", "nilfs2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """Where the shard files of drive ``number`` lie; ``link`` is what the store's link says.

    ``share`` is the part of the bytes of new shards that it takes; 0: none.
    """

    number: int
    folder: Path
    link: str
    share: float = 1.0

    @property
    def label(self) -> Path:
        """The file that says which store and which drive the folder belongs to."""
        return self.folder / LABEL

    def free_nbytes(self) -> int:
        """Return what an unprivileged process may still write here."""
        return free_nbytes(self.folder)


def free_nbytes(folder: Path) -> int:
    """Return what an unprivileged process may still write in a folder."""
    status = os.statvfs(folder)
    if not status.f_blocks:  # a ramfs has no size of its own: it takes what memory is left
        return int(psutil.virtual_memory().available)
    return status.f_bavail * status.f_frsize


def nearest(folder: Path) -> Path:
    """Return the folder of a drive, or the one above it while it is not created."""
    return folder if folder.is_dir() else folder.parent


def is_copy_on_write(drive: Drive) -> bool:
    """Whether overwriting reserved blocks may still need new ones on this drive."""
    return fsops.filesystem_type(drive.folder) in COPY_ON_WRITE


def link_of(store: Path, number: int) -> Path:
    """Return the store's link to a drive."""
    return store / "drives" / str(number)
