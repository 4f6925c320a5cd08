"""Telling a store where its drives are after they have moved."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tiering.drive import Drive, link_of
from tiering.drives import open_drives, replace_link
from tiering.errors import RefusedError
from tiering.generations import read_root
from tiering.labels import LABEL, read_label
from tiering.lock import StoreLock
from tiering.manifest import Root
from tiering.opened import examine_generation
from tiering.ownership import claim_drives

_log = logging.getLogger(__name__)


def attach_drives(path: str | os.PathLike[str], folders: Sequence[Path]) -> tuple[Drive, ...]:
    """Make the store's links lead to the drives in ``folders`` and return these drives.

    Each is the folder with the label of a drive, or the one above it; store and number are what
    the label says. Links, lengths and metadata of every generation are checked before a link
    changes, if no other drive is missing, and in any case before this returns.

    Raises:
        LockedError: A process writes the store, or a drive under another store's name.
        RefusedError: A folder is no drive of this store, or another store uses it, of which this
            is a copy; nothing was changed.
        CorruptionError: No generation is whole, or another drive is missing still.
    """
    store = Path(os.path.abspath(path))
    read_root(store)  # before the lock: nothing is created in a folder that is no store
    with StoreLock(store / "LOCK") as store_lock:
        root = read_root(store)
        found = [_found(store, root, Path(os.path.abspath(folder))) for folder in folders]
        attached = {drive.number: drive for drive in found}
        if len(attached) < len(found):
            raise RefusedError(f"drives given twice: {', '.join(str(d.number) for d in found)}")
        others = {n: share for n, share in root.drives.items() if n not in attached}
        if all(link_of(store, number).is_dir() for number in others):
            _check(store, root, [*attached.values(), *open_drives(store, root.uuid, others)])
        for drive in found:
            store_lock.own(drive.label)  # whoever writes there may be a store that was renamed
        claim_drives(store, root.uuid, found, adopt=True)
        for drive in found:
            replace_link(store, link_of(store, drive.number), drive.link)
        _check(store, root, open_drives(store, root.uuid, root.drives))
    return tuple(found)


def _check(store: Path, root: Root, drives: Sequence[Drive]) -> None:
    """Refuse if nothing is whole; damage to some generations has nothing to do with drives."""
    examined = [examine_generation(store, root, g, drives) for g in root.generations]
    if not any(item.whole for item in examined):
        raise examined[-1].faults[0]
    for item in examined:
        for fault in item.faults[:1]:
            _log.warning("%s", fault)


def _found(store: Path, root: Root, folder: Path) -> Drive:
    """Return the drive of the store that is at ``folder`` or in it."""
    labels = _labels(folder)
    ours = {place: number for place, (uuid, number) in labels.items() if uuid == root.uuid}
    if len(ours) > 1:
        raise RefusedError(
            f"drive {folder}: drives {_listed(ours.values())} are there; name one's folder"
        )
    if not ours and labels:
        place, (uuid, number) = next(iter(labels.items()))
        raise RefusedError(
            f"{place / LABEL}: drive {number} of store {uuid}, not of {store}, which is {root.uuid}"
        )
    if not ours:
        raise RefusedError(f"drive {folder}: no {LABEL} there, nor in a folder inside it")
    [(place, number)] = ours.items()
    if not isinstance(number, int) or number not in root.drives:
        raise RefusedError(
            f"{place / LABEL}: drive {number}, but {store} has {_listed(root.drives)}"
        )
    inside = place == store / "shards"
    drive = Drive(number=number, folder=place, link="../shards" if inside else str(place))
    return replace(drive, share=root.drives[number])


def _labels(folder: Path) -> dict[Path, tuple[object, object]]:
    """Return the labels of a folder, or else of the folders inside it."""
    if not folder.is_dir():
        raise RefusedError(f"drive {folder}: no such folder")
    if (folder / LABEL).is_file():
        return {folder: read_label(folder)}
    inside = sorted(path for path in folder.iterdir() if (path / LABEL).is_file())
    return {path: read_label(path) for path in inside}


def _listed(numbers: Iterable[object]) -> str:
    return ", ".join(map(str, numbers))
