"""What can be wrong with a store apart from its generations: root, drives, schema files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tiering.drives import expected_label, open_drives
from tiering.errors import CorruptionError
from tiering.generations import ROOT
from tiering.manifest import Root
from tiering.schema_files import read_schema_file, schema_digests
from tiering.small_files import read_small
from tiering.zarr_documents import group_document


def store_faults(store: Path, root: Root) -> Iterator[CorruptionError]:
    """Yield what is not as it was written, though ``root`` could be read.

    A commit may replace the root meanwhile.
    """
    yield from _root_faults(store / ROOT)
    yield from _unlike(store / "slots" / "zarr.json", group_document())
    yield from drive_faults(store, root)
    yield from _schema_faults(store, root.schema)


def _root_faults(path: Path) -> Iterator[CorruptionError]:
    try:
        found = read_small(path)
        expected = Root.decode(found, path).encode()
    except CorruptionError as fault:
        yield fault
    else:
        yield from _difference(path, found, expected, None)


def _unlike(path: Path, expected: bytes, *, drive: int | None = None) -> Iterator[CorruptionError]:
    """Yield a fault if a file is not exactly the one that is written."""
    try:
        found = read_small(path)
    except FileNotFoundError:
        yield CorruptionError(f"{path}: missing", file=path)
        return
    except CorruptionError as fault:
        yield fault
        return
    yield from _difference(path, found, expected, drive)


def _difference(
    path: Path, found: bytes, expected: bytes, drive: int | None
) -> Iterator[CorruptionError]:
    if found != expected:
        pairs = enumerate(zip(found, expected, strict=False))
        offset = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))
        yield CorruptionError(
            f"{path}: not what was written, from offset {offset} on",
            file=path,
            drive=drive,
            offset=offset,
        )


def drive_faults(store: Path, root: Root) -> Iterator[CorruptionError]:
    """Yield why drives cannot be used, or what else is wrong with their labels."""
    for number, share in root.drives.items():
        try:
            [drive] = open_drives(store, root.uuid, {number: share})
        except CorruptionError as fault:
            yield fault
            continue
        yield from _unlike(drive.label, expected_label(root.uuid, number), drive=number)


def _schema_faults(store: Path, key: str) -> Iterator[CorruptionError]:
    try:
        names = schema_digests(store, key)
    except CorruptionError as fault:
        yield fault
        return
    for name in names:
        try:
            read_schema_file(store, key, name)
        except CorruptionError as fault:
            yield fault
