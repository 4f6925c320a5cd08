"""Opening a store for writing: at its newest generation, at a given one, at one that is whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from tiering import fsops
from tiering.drives import open_drives
from tiering.errors import RefusedError, StorageError
from tiering.generations import ROOT, find_generation, going_back, named, read_root
from tiering.lock import StoreLock
from tiering.manifest import Generation, Root
from tiering.opened import Examined, examine_generation
from tiering.ownership import claim_drives, require_own_files
from tiering.slot_table import Form
from tiering.slots import places_of
from tiering.writer import StoreWriter

_log = logging.getLogger(__name__)

Choose = Callable[[Root, Mapping[int, Examined]], Generation]


def open_writer(
    path: str | os.PathLike[str], *, generation: int | None = None, run_id: str = ""
) -> StoreWriter:
    """Open a store for writing at its newest or the given generation.

    The generations that are visible are durable when this returns. Only the one that is opened
    has to be whole; before ``begin`` it has to be the newest: see ``make_newest``.

    Raises:
        LockedError: Another process writes the store.
        RefusedError: There is no store at ``path``, or no such generation in it, or it is a copy
            that shares its drives.
        CorruptionError: A manifest, metadata, drive, link or shard is not what was committed.
    """
    store = Path(os.path.abspath(path))

    def choose(root: Root, examined: Mapping[int, Examined]) -> Generation:
        number = root.latest.number if generation is None else generation
        found = find_generation(store, root, number)
        with going_back(root, found):
            _require_whole(examined[number])
        return found

    return _open(store, choose, run_id)


def open_newest_whole(
    path: str | os.PathLike[str], *, skip: Collection[int] = (), run_id: str = ""
) -> StoreWriter:
    """Open a store for writing at the newest generation that is whole and not in ``skip``.

    Each one that is passed over because it is not whole is logged with what is wrong with it.

    Raises:
        LockedError: Another process writes the store.
        RefusedError: There is no store at ``path``, or nothing but what is to be skipped, or it
            is a copy that shares its drives.
        CorruptionError: No generation is whole; the error is that of the newest.
        StorageError: It cannot be told whether one is: reading failed.
    """
    store = Path(os.path.abspath(path))

    def choose(root: Root, examined: Mapping[int, Examined]) -> Generation:
        found = [g for g in root.generations if g.number not in skip]
        if not found:
            raise RefusedError(f"{store}: no generation but {', '.join(map(str, skip))}")
        for generation in reversed(found):
            item = examined[generation.number]
            if item.whole:
                return generation
            if any(isinstance(fault, StorageError) for fault in item.faults):
                break
            _log.warning("generation %s is skipped: %s", named(generation), item.faults[0])
        with going_back(root, found[-1]):
            _require_whole(examined[found[-1].number])
        return found[-1]

    return _open(store, choose, run_id)


def _require_whole(examined: Examined) -> None:
    if examined.faults:
        raise examined.faults[0]


def _open(store: Path, choose: Choose, run_id: str) -> StoreWriter:
    read_root(store)  # before the lock: nothing is created in a folder that is no store
    store_lock = StoreLock(store / "LOCK", run_id)
    try:
        return _open_locked(store, choose, store_lock)
    except BaseException:
        store_lock.close()
        raise


def _open_locked(store: Path, choose: Choose, store_lock: StoreLock) -> StoreWriter:
    # A visible name is not yet durable: a writer may have died between rename and fsync.
    fsops.fsync_file(store / ROOT)
    fsops.fsync_dir(store)
    root = read_root(store)
    drives = open_drives(store, root.uuid, root.drives)
    claim_drives(store, root.uuid, drives)
    require_own_files(drives)
    examined = {g.number: examine_generation(store, root, g, drives) for g in root.generations}
    chosen = choose(root, examined).number
    found = examined[chosen].whole
    assert found is not None  # only whole ones are chosen
    form = Form(records=found.records, documents=found.documents, places=places_of(found.locations))
    writer = StoreWriter(
        path=store,
        uuid=root.uuid,
        schema=root.schema,
        form=form,
        drives=drives,
        store_lock=store_lock,
    )
    try:
        writer.resume(root, chosen, examined)
    except BaseException:
        writer.close()
        raise
    return writer
