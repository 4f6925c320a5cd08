"""What a reader and a writer of a store have in common: its parts, checked and open."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tiering import fsops
from tiering.backends.posix import OPEN_FILES, PosixBackend
from tiering.backends.probe import Access, probe
from tiering.checksum import Table
from tiering.drives import Drive
from tiering.errors import CorruptionError, RefusedError, StorageError
from tiering.manifest import Generation, Manifest, Root, decode_table, digest, parse_object
from tiering.recordio import RecordFiles
from tiering.records import Record
from tiering.schema_files import read_schema_file, schema_digests
from tiering.slots import read_metadata

ROOT = "zarr.json"
MARKER = "CREATING"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """Where the valid bytes of one chunk lie, and what their crc32c was when committed."""

    index: int
    path: Path
    drive: int
    offset: int
    nbytes: int
    crc: int


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


def load_records(store: Path, slot: int, manifest: Manifest) -> dict[str, Record]:
    """Return the records of a generation after checking the metadata of ``slot``."""
    metadata = read_metadata(store, slot, manifest.metadata)
    return {
        name: Record(
            name=name,
            dtype=entry.dtype,
            length=entry.length,
            shared=entry.shared,
            attributes=parse_object(metadata[f"{name}/zarr.json"], store / name)["attributes"],
        )
        for name, entry in manifest.records.items()
    }


class OpenStore:
    """The parts of an open store. Reads and writes are thread-safe, opening and closing are not.

    Attributes:
        path: Folder of the store.
        records: Every record by name, in the order of the manifest.
        drives: Where its shards lie.
        access: How each drive is read and written, and why.
    """

    def __init__(
        self,
        *,
        path: Path,
        schema: str,
        records: Mapping[str, Record],
        drives: Sequence[Drive],
        writable: bool,
    ) -> None:
        self.path = path
        self.records = records
        self.drives = tuple(drives)
        self._schema = schema
        self.access: tuple[Access, ...] = tuple(
            probe(d.folder, sample=None if writable else d.label) for d in self.drives
        )
        limit = fsops.raise_open_file_limit(1024 + OPEN_FILES * len(self.drives))
        per_drive = max(16, min(OPEN_FILES, (limit - 256) // (2 * len(self.drives))))
        self.backends = tuple(
            PosixBackend(
                str(drive.number), direct=access.direct, writable=writable, open_files=per_drive
            )
            for drive, access in zip(self.drives, self.access, strict=True)
        )
        self._files = RecordFiles(records, self.backends)

    def schema_names(self) -> list[str]:
        """Return the names of the files that were given when the store was created."""
        return list(schema_digests(self.path, self._schema))

    def schema_file(self, name: str) -> bytes:
        """Return the content of a schema file; ``KeyError`` if there is none of that name."""
        return read_schema_file(self.path, self._schema, name)

    def close(self) -> None:
        """Wait for transfers in flight and close every file."""
        for backend in self.backends:
            backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _chunks(self, name: str, slot: int, checksums: Table) -> Iterator[ChunkRef]:
        record = self.records[name]
        geometry = record.geometry
        shards = self._files.locations(slot)[name]
        for index in range(geometry.chunk_count):
            number, place = divmod(index, geometry.chunks_per_shard)
            start = index * geometry.chunk_nbytes
            yield ChunkRef(
                index=index,
                path=shards[number].path,
                drive=shards[number].drive,
                offset=place * geometry.chunk_nbytes,
                nbytes=min(geometry.chunk_nbytes, record.nbytes - start),
                crc=int(checksums[index]),
            )


def checksums_of(name: str, manifest: Manifest, table: Table) -> Table:
    """Return the checksums of one record's chunks."""
    entry = manifest.records[name]
    return table[entry.first : entry.first + entry.count]
