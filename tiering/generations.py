"""The files that say which generations exist: the root, and a manifest with its checksums each."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiering import fsops, lock
from tiering.checksum import Table
from tiering.errors import CorruptionError, LockedError, RefusedError
from tiering.manifest import Generation, Manifest, NoStoreError, Root, decode_table, digest
from tiering.small_files import DOCUMENT_MOST, read_small, require_own_folders

ROOT = "zarr.json"
MARKER = "CREATING"  # stands where a store is being made until its first commit


def read_root(store: Path) -> Root:
    """Return the root of the store at ``store``.

    Raises:
        RefusedError: There is no store, or one of a newer format.
        CorruptionError: The root is missing or damaged.
        StorageError: It cannot be read.
    """
    path = store / ROOT
    if not store.is_dir():
        what = "is no folder" if store.exists() else "does not exist"
        raise RefusedError(f"{store}: no store: the path {what}")
    try:
        data = read_small(path)
    except FileNotFoundError as error:
        if (store / MARKER).exists():
            raise RefusedError(
                f"{store}: no store: its creation did not reach the first commit; create it again"
            ) from error
        if (store / "manifests").is_dir():  # they are made after the marker and removed before it
            raise CorruptionError(
                f"{path}: missing, though there are manifests", file=path
            ) from error
        raise RefusedError(f"{store}: no store: it has no {ROOT}") from error
    try:
        root = Root.decode(data, path)
    except NoStoreError as error:
        if (store / "manifests").is_dir():
            raise CorruptionError(f"{error}, though there are manifests", file=path) from error
        raise
    require_own_folders(store, ("manifests", "schema", "slots", "drives"))
    return root


def manifest_path(store: Path, number: int) -> Path:
    """Return where the manifest of a generation is."""
    return store / "manifests" / str(number) / "manifest.json"


def read_manifest(store: Path, root: Root, generation: Generation) -> tuple[Manifest, Table]:
    """Return what a listed generation is, checked against the root's digest of it."""
    folder = store / generation.folder
    path = folder / "manifest.json"
    data = _read_committed(path, generation)
    if digest(data) != generation.digest:
        raise CorruptionError(
            f"{path}: found sha256 {digest(data)}, the root names {generation.digest}", file=path
        )
    manifest = Manifest.decode(data, path)
    found = (
        manifest.uuid,
        manifest.generation,
        manifest.parent,
        manifest.slot,
        manifest.step,
    )
    expected = (
        root.uuid,
        generation.number,
        generation.parent,
        generation.slot,
        generation.step,
    )
    if found != expected:
        raise CorruptionError(
            f"{path}: store, generation, parent, slot and step are {found}, expected "
            f"{expected} as in {store / ROOT}",
            file=path,
        )
    table_path = folder / "checksums.bin"
    table = _read_committed(table_path, generation, manifest.table_nbytes)
    return manifest, decode_table(table, manifest, table_path)


def _read_committed(path: Path, generation: Generation, most: int = DOCUMENT_MOST) -> bytes:
    try:
        return read_small(path, most)
    except FileNotFoundError as error:
        raise CorruptionError(
            f"{path}: missing, though the root lists generation {generation.number}", file=path
        ) from error


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
    # Only when this has returned may the slot of a dropped generation be overwritten.
    fsops.replace_file(store / ROOT, root.encode(), fresh=store / f"{ROOT}.new")


def reap(store: Path, listed: Collection[int]) -> dict[Path, int]:
    """Remove the manifests that the durable root does not list, except those being read.

    Returns:
        The manifests that readers still hold, each with the slot that they read.
    """
    held = {}
    for path in manifests(store):
        if int(path.parent.name) not in listed and not _remove_unread(path):
            held[path] = _slot_being_read(path)
    return held


def _slot_being_read(path: Path) -> int:
    try:
        return Manifest.decode(read_small(path), path).slot
    except CorruptionError as error:
        readers = lock.named_pids(lock.holders_of(path))
        raise LockedError(f"{error}; it is being read by {readers}: end that first") from error


def manifests(store: Path) -> list[Path]:
    """Return the manifest of every generation, listed or not; the files may be missing."""
    folders = sorted((store / "manifests").iterdir())
    return [folder / "manifest.json" for folder in folders if folder.name.isdecimal()]


def find_generation(store: Path, root: Root, number: int) -> Generation:
    """Return the listed generation ``number``.

    Raises:
        RefusedError: It is not listed; the message names those that are.
    """
    found = root.find(number)
    if found is None:
        listed = ", ".join(named(g) for g in root.generations)
        raise RefusedError(f"{store}: no generation {number}; there is {listed}")
    return found


def named(generation: Generation) -> str:
    """Return number and step of a generation, and which one it is again."""
    number, parent = generation.number, generation.parent
    again = f", {parent} again" if parent is not None and parent < number - 1 else ""
    return f"{number} (step {generation.step}{again})"


@contextmanager
def going_back(root: Root, generation: Generation) -> Iterator[None]:
    """Add to what is wrong with a generation which others there are, and how to take them."""
    others = [g for g in root.generations if g != generation]
    try:
        yield
    except CorruptionError as error:
        if not others:
            raise
        raise CorruptionError(
            f"{error}\ngeneration {named(generation)} is damaged; there is also "
            f"{', '.join(map(named, others))}: take it with --generation {others[-1].number} "
            "(resume, export, inspect), or drop what is damaged with megatrain-ckpt prune",
            file=error.file,
            drive=error.drive,
            offset=error.offset,
            nbytes=error.nbytes,
            record=error.record,
        ) from error


def _remove_unread(path: Path) -> bool:
    """Remove a manifest with its folder; False while a reader holds it."""
    # A folder that is a link is nobody's manifest, and what it leads to is not ours. Without a
    # manifest it is a commit that did not get as far.
    if path.parent.is_symlink() or not path.exists():
        fsops.remove_tree(path.parent)
        return True
    fd = lock.claim(path)
    if fd is None:
        return False
    try:
        fsops.remove_tree(path.parent)
    finally:
        os.close(fd)
    return True


def checksums_of(name: str, manifest: Manifest, table: Table) -> Table:
    """Return the checksums of one record's chunks."""
    entry = manifest.records[name]
    return table[entry.first : entry.first + entry.count]
