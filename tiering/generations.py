"""The files that say which generations exist: the root, and a manifest with its checksums each."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from tiering import fsops, lock
from tiering.checksum import Table
from tiering.errors import CorruptionError, RefusedError, StorageError
from tiering.manifest import Generation, Manifest, Root, decode_table, digest

ROOT = "zarr.json"
MARKER = "CREATING"  # stands where a store is being made until its first commit


def read_root(store: Path) -> Root:
    """Return the root of the store at ``store``.

    Raises:
        RefusedError: There is no store, or one of a newer format.
    """
    path = store / ROOT
    if not store.is_dir():
        what = "is no folder" if store.exists() else "does not exist"
        raise RefusedError(f"{store}: no store: the path {what}")
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        if (store / MARKER).exists():
            raise RefusedError(
                f"{store}: no store: its creation did not reach the first commit; create it again"
            ) from error
        raise RefusedError(f"{store}: no store: it has no {ROOT}") from error
    except OSError as error:
        raise StorageError("read", path, errno=error.errno or 0) from error
    return Root.decode(data, path)


def read_manifest(store: Path, root: Root, generation: Generation) -> tuple[Manifest, Table]:
    """Return what a listed generation is, checked against the root's digest of it."""
    folder = store / generation.folder
    path = folder / "manifest.json"
    data = _read_committed(path, generation)
    if digest(data) != generation.digest:
        raise CorruptionError(
            f"{path}: found sha256 {digest(data)}, the root names {generation.digest}"
        )
    manifest = Manifest.decode(data, path)
    found = (manifest.uuid, manifest.generation, manifest.slot, manifest.step)
    expected = (root.uuid, generation.number, generation.slot, generation.step)
    if found != expected:
        raise CorruptionError(
            f"{path}: store, generation, slot and step are {found}, expected "
            f"{expected} as in {store / ROOT}"
        )
    table_path = folder / "checksums.bin"
    return manifest, decode_table(_read_committed(table_path, generation), manifest, table_path)


def _read_committed(path: Path, generation: Generation) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptionError(
            f"{path}: missing, though the root lists generation {generation.number}"
        ) from error
    except OSError as error:
        raise StorageError("read", path, errno=error.errno or 0) from error


def publish(store: Path, root: Root, manifest: bytes, table: bytes) -> None:
    """Make ``root`` and the manifest of its latest generation durable, and then visible.

    Everything that they promise is durable already.
    """
    folder = store / root.latest.folder
    fsops.make_dir(folder)
    fsops.write_file(folder / "checksums.bin", table)
    fsops.write_file(folder / "manifest.json", manifest)
    fsops.fsync_dir(folder)
    fsops.fsync_dir(folder.parent)
    replace_root(store, root)


def replace_root(store: Path, root: Root) -> None:
    """Make ``root`` visible and durable; what it names is durable already."""
    temporary = store / f"{ROOT}.new"
    fsops.unlink(temporary, missing_ok=True)
    fsops.write_file(temporary, root.encode())
    fsops.replace(temporary, store / ROOT)
    fsops.fsync_dir(store)  # only now may the slot of a dropped generation be overwritten


def reap(store: Path, listed: Collection[int]) -> dict[int, Path]:
    """Remove the manifests that the durable root does not list, except those being read.

    Returns:
        The slots that readers still hold, each with the manifest that they hold it by.
    """
    held = {}
    for folder in sorted((store / "manifests").iterdir()):
        if folder.name.isdecimal() and int(folder.name) not in listed:
            path = folder / "manifest.json"
            if not _remove_unread(path):
                held[Manifest.decode(path.read_bytes(), path).slot] = path
    return held


def _remove_unread(path: Path) -> bool:
    """Remove a manifest with its folder; False while a reader holds it."""
    if not path.exists():  # a commit that did not get as far
        fsops.remove_tree(path.parent)
        return True
    fd = lock.claim(path)
    if fd is None:
        return False
    try:
        fsops.unlink(path)
        fsops.remove_tree(path.parent)
    finally:
        os.close(fd)
    return True


def checksums_of(name: str, manifest: Manifest, table: Table) -> Table:
    """Return the checksums of one record's chunks."""
    entry = manifest.records[name]
    return table[entry.first : entry.first + entry.count]
