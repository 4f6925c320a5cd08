"""What a reader and a writer of a store have in common: its parts, checked and open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tiering import fsops
from tiering.backends.choice import DriveBackend, Engine, open_backends
from tiering.backends.posix import OPEN_FILES
from tiering.backends.probe import Access, probe
from tiering.checksum import Table
from tiering.drives import Drive
from tiering.manifest import Manifest, parse_object
from tiering.recordio import RecordFiles
from tiering.records import Record
from tiering.schema_files import read_schema_file, schema_digests


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """Where the valid bytes of one chunk lie, and what their crc32c was when committed."""

    index: int
    path: Path
    drive: int
    offset: int
    nbytes: int
    crc: int


def records_of(manifest: Manifest, documents: Mapping[str, bytes]) -> dict[str, Record]:
    """Return the records of a generation with the attributes that their metadata holds."""
    return {
        name: Record(
            name=name,
            dtype=entry.dtype,
            length=entry.length,
            shared=entry.shared,
            attributes=_attributes(name, documents),
        )
        for name, entry in manifest.records.items()
    }


def _attributes(name: str, documents: Mapping[str, bytes]) -> Mapping[str, Any]:
    path = f"{name}/zarr.json"
    attributes: Mapping[str, Any] = parse_object(documents[path], Path(path))["attributes"]
    return attributes


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
        self._open_files, self._writable = per_drive, writable
        self.backends: list[DriveBackend] = self._open_backends("posix")
        self._files = RecordFiles(records, self.backends)

    def _open_backends(self, engine: Engine) -> list[DriveBackend]:
        return open_backends(
            [str(drive.number) for drive in self.drives],
            self.access,
            engine=engine,
            writable=self._writable,
            open_files=self._open_files,
        )

    def use_engine(self, engine: Engine) -> None:
        """Move shards by ``engine`` from now on; nothing may be in flight.

        A store opens with posix: tools that look at a few bytes need no GPU library.

        Raises:
            RefusedError: kvikio was asked for by name and cannot be used here.
        """
        fresh = self._open_backends(engine)
        for backend in self.backends:
            backend.close()
        self.backends[:] = fresh  # in place: the record files hold this very list

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chunk(self, name: str, index: int, slot: int, checksums: Table) -> ChunkRef:
        record = self.records[name]
        geometry = record.geometry
        shard, place = divmod(index, geometry.chunks_per_shard)
        found = self._files.locations(slot)[name][shard]
        return ChunkRef(
            index=index,
            path=found.path,
            drive=found.drive,
            offset=place * geometry.chunk_nbytes,
            nbytes=min(geometry.chunk_nbytes, record.nbytes - index * geometry.chunk_nbytes),
            crc=int(checksums[index]),
        )
