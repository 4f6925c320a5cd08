"""Whose a drive is: a copy of a store leads to the same drives, and would write over the original.

The label of a drive names the store's folder. Whoever is about to write claims its drives first,
and is refused those that another store with the same uuid uses, or may use: the other can be
where nobody sees it now. ``attach`` is how a user decides that.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiering import fsops
from tiering.drive import Drive, link_of
from tiering.errors import CorruptionError, RefusedError, StorageError
from tiering.labels import LABEL, Owner, expected_label, identity, owner_of, read_owner
from tiering.small_files import read_small

_log = logging.getLogger(__name__)


def unfinished_label(folder: Path) -> Path:
    """Return where the next label of a drive is written before it gets its name."""
    return folder / f"{LABEL}{fsops.UNFINISHED}"


def find_other(store: Path, number: int, folder: Path) -> Owner | None:
    """Return whose a drive is if it is another store's, or may be one's that is not there now.

    A store that was renamed is still the same.

    Raises:
        CorruptionError: The label does not tell.
        StorageError: It names a place that cannot be looked at.
    """
    owner = read_owner(folder)
    if owner is None or _is_same(owner.store, store):
        return None
    if not uses(owner.store, number, folder) and owner.folder == identity(store):
        return None
    return owner


def uses(store: Path, number: int, folder: Path) -> bool:
    """Whether there is a store at ``store`` whose drive ``number`` is ``folder``."""
    return _exists(store / "zarr.json") and _is_same(link_of(store, number), folder)


def _exists(path: Path) -> bool:
    return _is_same(path, path)


def _is_same(one: Path, other: Path) -> bool:
    """Whether both are there and are the same."""
    try:
        return os.path.samestat(one.stat(), other.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return False
        raise StorageError("look at", error.filename or one, errno=error.errno or 0) from error


def owner_for(store: Path, drive: Drive) -> Owner | None:
    """Return what the label of a drive says of its store: nothing if it goes where that goes."""
    within = drive.folder.resolve().is_relative_to(store.resolve())
    return None if within and not os.path.isabs(drive.link) else owner_of(store)


# -- claiming ------------------------------------------------------------------------------------


def claim_drives(store: Path, uuid: str, drives: Sequence[Drive], *, adopt: bool = False) -> None:
    """Make drives known as those of ``store``, durably: before anything is written to one.

    With ``adopt`` also those of a store that is not there now; a drive that cannot be written
    is left as it is then.

    Raises:
        RefusedError: A drive belongs to another store; nothing was changed.
    """
    wanted = list(_wanted(store, uuid, drives))
    for drive, _ in wanted:
        _require_own(store, drive, adopt=adopt)
    for drive, label in wanted:
        try:
            _relabel(drive, label)
        except StorageError as error:
            if not adopt or error.errno != errno.EROFS:
                raise
            _log.warning("%s, so that %s can only be read", error, store)


def _wanted(store: Path, uuid: str, drives: Sequence[Drive]) -> Iterator[tuple[Drive, bytes]]:
    for drive in drives:
        owner = owner_for(store, drive)
        if owner is not None:
            yield drive, expected_label(uuid, drive.number, owner)


def _require_own(store: Path, drive: Drive, *, adopt: bool) -> None:
    way_out = f"megatrain-ckpt attach {store} --drive {drive.folder}"
    try:
        other = find_other(store, drive.number, drive.folder)
    except CorruptionError as error:
        if adopt:
            return
        raise RefusedError(
            f"{error}; whose the drive is cannot be told: if it is that of {store}: {way_out}"
        ) from error
    if other is None:
        return
    if uses(other.store, drive.number, drive.folder):
        raise RefusedError(
            f"{store} is a copy of {other.store}, and both have their shards in {drive.folder}: "
            f"writing one would destroy the other. To have two, copy {drive.folder} as well and "
            f"tell the copy with megatrain-ckpt attach {store} --drive FOLDER, or export the "
            "weights; to have one, remove the other's folder"
        )
    if not adopt:
        raise RefusedError(
            f"drive {drive.number} in {drive.folder} belongs to the store {other.store}, which is "
            f"not there now. If {store} is that store, or takes its place for ever: {way_out}"
        )


def require_own_files(drives: Sequence[Drive]) -> None:
    """Refuse files that have other names too: what is written in place would show there.

    Raises:
        RefusedError: One of the drives holds such a file.
    """
    for drive in drives:
        with os.scandir(drive.folder) as entries:
            for entry in entries:
                names = entry.stat(follow_symlinks=False).st_nlink
                if names > 1 and entry.is_file(follow_symlinks=False):
                    raise RefusedError(
                        f"{entry.path} has {names} names (cp -l, or a program that links equal "
                        "files), and it is written in place: the others would change with it. "
                        f"Replace {drive.folder} by a copy (cp -r --sparse=always)"
                    )


def _relabel(drive: Drive, label: bytes) -> None:
    if read_small(drive.label) != label:
        fsops.replace_file(drive.label, label, fresh=unfinished_label(drive.folder))
