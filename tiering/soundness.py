"""What can be wrong with a store apart from its generations: root, drives, schema files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tiering.drives import open_drives
from tiering.errors import CorruptionError, StorageError
from tiering.generations import ROOT
from tiering.labels import expected_label, read_owner
from tiering.manifest import Root
from tiering.schema_files import read_schema_file, schema_digests
from tiering.small_files import read_small
from tiering.zarr_documents import group_document

Faults = list[CorruptionError]


def store_faults(store: Path, root: Root) -> Sequence[CorruptionError]:
    """Return what is not as it was written, though ``root`` could be read.

    A commit may replace the root meanwhile.
    """
    faults: Faults = []
    with _kept(faults):
        found = read_small(store / ROOT)
        _require_equal(store / ROOT, found, Root.decode(found, store / ROOT).encode())
    with _kept(faults):
        _require(store / "slots" / "zarr.json", group_document())
    for number, share in root.drives.items():
        with _kept(faults, number):
            [drive] = open_drives(store, root.uuid, {number: share})
            owner = read_owner(drive.folder)
            _require(drive.label, expected_label(root.uuid, number, owner), drive=number)
    with _kept(faults):
        for name in schema_digests(store, root.schema):
            with _kept(faults):
                read_schema_file(store, root.schema, name)
    return faults


@contextmanager
def _kept(faults: Faults, drive: int | None = None) -> Iterator[None]:
    """Go on after a fault, and after a file that its drive does not give back."""
    try:
        yield
    except CorruptionError as fault:
        fault.drive = drive if fault.drive is None else fault.drive
        faults.append(fault)
    except StorageError as error:
        faults.append(CorruptionError(str(error), file=error.path, drive=drive))


def _require(path: Path, expected: bytes, *, drive: int | None = None) -> None:
    """Refuse a file that is not exactly the one that is written."""
    try:
        found = read_small(path)
    except FileNotFoundError as error:
        raise CorruptionError(f"{path}: missing", file=path, drive=drive) from error
    _require_equal(path, found, expected, drive)


def _require_equal(path: Path, found: bytes, expected: bytes, drive: int | None = None) -> None:
    if found != expected:
        pairs = enumerate(zip(found, expected, strict=False))
        offset = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))
        raise CorruptionError(
            f"{path}: not what was written, from offset {offset} on",
            file=path,
            drive=drive,
            offset=offset,
        )
