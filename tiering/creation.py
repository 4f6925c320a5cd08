"""Creating a store: nothing that looks like one exists before its first commit."""

from __future__ import annotations

import json
import logging
import os
import uuid as uuids
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tiering import bandwidth, fsops
from tiering.bandwidth import Measure, with_shares
from tiering.drive import Drive
from tiering.drives import create_drive, is_ours, plan_drives, settle_removal
from tiering.errors import RefusedError, StorageError
from tiering.generations import MARKER, ROOT
from tiering.lock import StoreLock
from tiering.records import Record
from tiering.schema_files import write_schema_files
from tiering.shares import spread
from tiering.slot_table import Form
from tiering.slots import metadata_documents
from tiering.space import slots_nbytes
from tiering.writer import StoreWriter
from tiering.zarr_documents import group_document

_log = logging.getLogger(__name__)

_PARTS = (f"{ROOT}.new", "manifests", "schema", "slots", "drives", "shards")


@contextmanager
def create_store(
    path: str | os.PathLike[str],
    *,
    records: Sequence[Record],
    schema_files: Mapping[str, bytes],
    drives: Sequence[Path] = (),
    slots: int = 1,
    measure: Measure = bandwidth.measure,
) -> Iterator[StoreWriter]:
    """Lend the writer of a new store, with slot 0 as its working slot and all records zero.

    The store exists from its first commit on. Leaving without one, by an exception or not,
    removes everything that was made. Without ``drives`` the shards lie inside the store; several
    are measured, and each gets its share of the shards.

    Raises:
        RefusedError: There is a store already, or a folder with other things in it.
        LockedError: Another process is creating a store there.
    """
    if slots < 1 or not records or len({r.name for r in records}) != len(records):
        raise ValueError("a store needs a slot, and records of different names")
    store = Path(os.path.abspath(path))
    _require_fresh(store)
    uuid = uuids.uuid4().hex
    plan = plan_drives(store, uuid, drives)
    made = not store.exists()
    if made:
        fsops.make_dir(store)
    with _locked(store, made) as store_lock:
        _require_fresh(store)  # again: another creation may have ended meanwhile
        _clear_remains(store)
        writer = None
        try:
            plan = with_shares(plan, slots_nbytes(records, max(2, slots)), measure=measure)
            with _created(store, uuid, plan, records, schema_files, slots, store_lock) as writer:
                yield writer
        finally:
            if writer is None or writer.committed is None:
                _abandon(store, made)


def _locked(store: Path, made: bool) -> StoreLock:
    try:
        return StoreLock(store / "LOCK")
    except StorageError:
        if made and {entry.name for entry in store.iterdir()} <= {"LOCK"}:
            fsops.remove_tree(store)
        raise


@contextmanager
def _created(
    store: Path,
    uuid: str,
    plan: Sequence[Drive],
    records: Sequence[Record],
    schema_files: Mapping[str, bytes],
    slots: int,
    store_lock: StoreLock,
) -> Iterator[StoreWriter]:
    _write_marker(store, uuid, plan)
    for name in ("manifests", "schema", "slots", "drives"):
        fsops.make_dir(store / name)
    fsops.create_file(store / "slots" / "zarr.json", group_document())
    for drive in plan:
        create_drive(store, uuid, drive)
    schema = write_schema_files(store, schema_files)
    writer = StoreWriter(
        path=store,
        uuid=uuid,
        schema=schema,
        form=Form(
            records={record.name: record for record in records},
            documents=metadata_documents(records),
            places=spread(records, {drive.number: drive.share for drive in plan}),
        ),
        drives=plan,
        store_lock=store_lock,
    )
    with writer:
        writer.start(slots)
        yield writer


def _require_fresh(store: Path) -> None:
    """Refuse a path where something is that this program did not leave half made."""
    if not store.exists():
        if not store.parent.is_dir():
            raise RefusedError(f"{store}: folder {store.parent} does not exist")
        return
    if not store.is_dir():
        raise RefusedError(f"{store}: exists and is no folder")
    names = {entry.name for entry in store.iterdir()} - {"LOCK"}
    if ROOT in names:
        raise RefusedError(f"{store}: is a store or a Zarr group already; choose another path")
    if names and _remains(store) is None:
        raise RefusedError(
            f"{store}: folder is not empty, it holds {sorted(names)[0]!r}; choose another path"
        )


def _write_marker(store: Path, uuid: str, plan: Sequence[Drive]) -> None:
    """Say durably what is about to be made, so that whoever comes after a kill can remove it."""
    made = {"uuid": uuid, "drives": [str(drive.folder) for drive in plan]}
    # ASCII: the path of a drive need not be text, and is escaped then
    fsops.write_file(store / MARKER, json.dumps(made, indent=1).encode() + b"\n")
    fsops.fsync_dir(store)
    fsops.fsync_dir(store.parent)  # or nothing leads to the marker, but the drives are there


def _remains(store: Path) -> tuple[str, list[Path]] | None:
    """Return uuid and drive folders of a creation that did not end, or None if there was none.

    The marker is durable before anything else is made: a torn one stands alone.
    """
    marker = store / MARKER
    names = {entry.name for entry in store.iterdir()}
    try:
        document = json.loads(marker.read_bytes())
        uuid, folders = str(document["uuid"]), [Path(folder) for folder in document["drives"]]
    except (OSError, ValueError, TypeError, KeyError):
        return ("", []) if names <= {"LOCK", MARKER} and MARKER in names else None
    return (uuid, folders) if names <= {"LOCK", MARKER, *_PARTS} else None


def _clear_remains(store: Path) -> None:
    remains = _remains(store)
    if remains is not None:
        _log.warning("%s: removing what an interrupted creation left", store)
        _dismantle(store, *remains)


def _dismantle(store: Path, uuid: str, folders: Sequence[Path]) -> None:
    for number, folder in enumerate(folders):
        if is_ours(store, uuid, number, folder):
            _remove_drive(folder)
        else:
            settle_removal(folder)
    for name in _PARTS:
        fsops.remove_tree(store / name)
    fsops.fsync_dir(store)  # the marker goes last, or a power cut leaves parts without it
    fsops.unlink(store / MARKER)


def _remove_drive(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.name != "drive.json":  # the label goes last: it says that the rest may go
            fsops.remove_tree(path)
    fsops.fsync_dir(folder)
    fsops.remove_tree(folder)
    fsops.fsync_dir(folder.parent)


def _abandon(store: Path, made: bool) -> None:
    """Remove everything of a creation that ended without a commit, or with one in doubt."""
    _log.info("%s: not committed, removed", store)
    if (store / ROOT).exists():
        fsops.unlink(store / ROOT)
        fsops.fsync_dir(store)  # or a power cut leaves a root that names what is gone
    remains = _remains(store)
    if remains is not None:
        _dismantle(store, *remains)
    fsops.unlink(store / "LOCK", missing_ok=True)
    if made:
        fsops.remove_dir(store)
