"""What a reader and a writer of a store have in common: its parts, checked and open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tiering import fsops
from tiering.backends.choice import DriveBackend, Engine, open_backends
from tiering.backends.posix import OPEN_FILES
from tiering.backends.probe import Access, probe
from tiering.backends.zarr3 import Zarr3Backend
from tiering.checksum import Table
from tiering.drive import Drive
from tiering.errors import CorruptionError, MegatrainError, StorageError
from tiering.fields import Fields, parse_object, shown
from tiering.generations import read_manifest
from tiering.manifest import Entry, Generation, Manifest, Root
from tiering.recordio import RecordFiles
from tiering.records import Record
from tiering.schema_files import read_schema_file, schema_digests
from tiering.slots import Locations, OnFault, locate, read_metadata, refuse, slot_folder
from tiering.zarr_documents import array_document


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """Where the valid bytes of one chunk lie, and what their crc32c was when committed.

    ``offset`` is None where the chunk is encoded: then the shard's index says where it begins.
    """

    index: int
    path: Path
    drive: int
    offset: int | None
    nbytes: int
    crc: int

    def __str__(self) -> str:
        where = f"chunk {self.index}" if self.offset is None else f"offset {self.offset}"
        return f"drive {self.drive}: {self.path} at {where}, {self.nbytes} B"

    def damage(self, record: str, found: int) -> CorruptionError:
        """Return what says that the chunk has the crc32c ``found``, and not its own."""
        return CorruptionError(
            f"record {record}: chunk {self.index} is damaged on {self}: crc32c is {found:08x}, "
            f"committed was {self.crc:08x}",
            file=self.path,
            drive=self.drive,
            offset=self.offset,
            nbytes=None if self.offset is None else self.nbytes,
            record=record,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGeneration:
    """One listed generation, complete as far as can be seen without reading its bytes.

    ``documents`` are the metadata files of its slot, ``table`` the crc32c of every chunk.
    """

    manifest: Manifest
    table: Table
    documents: Mapping[str, bytes]
    records: Mapping[str, Record]
    locations: Locations


def open_generation(
    store: Path,
    root: Root,
    generation: Generation,
    drives: Sequence[Drive],
    on_fault: OnFault = refuse,
) -> OpenGeneration:
    """Return what a listed generation is, after checking digests, links and lengths.

    Whatever ``on_fault`` lets pass is left out.

    Raises:
        CorruptionError: A manifest, metadata, link or shard is not what was committed.
    """
    manifest, table = read_manifest(store, root, generation)
    documents = read_metadata(store, generation.slot, manifest.metadata, on_fault)
    records = _records_of(manifest, documents, slot_folder(store, generation.slot))
    locations = locate(
        store,
        generation.slot,
        records=list(records.values()),
        drives=drives,
        lengths={name: entry.files for name, entry in manifest.records.items()},
        on_fault=on_fault,
    )
    return OpenGeneration(
        manifest=manifest,
        table=table,
        documents=documents,
        records=records,
        locations=locations,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A listed generation as far as it is whole: None where not even its manifest is."""

    found: OpenGeneration | None
    faults: tuple[MegatrainError, ...]

    @property
    def whole(self) -> OpenGeneration | None:
        """The generation, if nothing is wrong with it."""
        return None if self.faults else self.found


def examine_generation(
    store: Path, root: Root, generation: Generation, drives: Sequence[Drive]
) -> Examined:
    """Return what is there of a listed generation, and everything that is wrong with it.

    No bytes of records are read.
    """
    faults: list[MegatrainError] = []
    try:
        found = open_generation(store, root, generation, drives, faults.append)
    except (CorruptionError, StorageError) as fault:
        return Examined(found=None, faults=(*faults, fault))
    return Examined(found=found, faults=tuple(faults))


def _records_of(
    manifest: Manifest, documents: Mapping[str, bytes], folder: Path
) -> dict[str, Record]:
    """Return the records of a generation with the attributes that their metadata holds."""
    return {
        name: _record(name, entry, folder / name / "zarr.json", documents.get(f"{name}/zarr.json"))
        for name, entry in manifest.records.items()
    }


def _record(name: str, entry: Entry, path: Path, document: bytes | None) -> Record:
    """Return a record that its metadata describes as the manifest does."""
    if document is None:  # damaged, and let pass
        return entry.record(name)
    fields = Fields(parse_object(document, path), path, "")
    record = entry.record(name, fields.mapping("attributes"))
    for key, value in parse_object(array_document(record), path).items():
        if key != "attributes":
            fields.equal(key, value, f"{shown(value)} by the manifest")
    return record


class OpenStore:
    """The parts of an open store. Reads and writes are thread-safe, opening and closing are not.

    Attributes:
        path: Folder of the store.
        records: Every record by name, in the order of the manifest.
        drives: Where its shards lie.
        access: How each drive is read and written, and why.
        waits: Which files each thread waits for.
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
        self.backends: tuple[DriveBackend, ...] = self._open_backends("posix")
        self._encoded: dict[int, Zarr3Backend] = {}
        places = {drive.number: place for place, drive in enumerate(self.drives)}
        self._files = RecordFiles(lambda drive: self.backends[places[drive]], self._encoded_backend)
        self.waits = self._files.waits

    def _encoded_backend(self, drive: int) -> Zarr3Backend:
        """Return what moves the encoded shards of a drive; most stores have none."""
        if drive not in self._encoded:
            self._encoded[drive] = Zarr3Backend(str(drive), drive=drive, writable=self._writable)
        return self._encoded[drive]

    def _open_backends(self, engine: Engine) -> tuple[DriveBackend, ...]:
        return tuple(
            open_backends(
                [str(drive.number) for drive in self.drives],
                self.access,
                engine=engine,
                writable=self._writable,
                open_files=self._open_files,
            )
        )

    def use_engine(self, engine: Engine) -> None:
        """Move shards by ``engine`` from now on; nothing may be in flight.

        A store opens with posix: tools that look at a few bytes need no GPU library.

        Raises:
            RefusedError: kvikio was asked for by name and cannot be used here.
        """
        before, self.backends = self.backends, self._open_backends(engine)
        for backend in before:
            backend.close()

    def schema_names(self) -> list[str]:
        """Return the names of the files that were given when the store was created."""
        return list(schema_digests(self.path, self._schema))

    def schema_file(self, name: str) -> bytes:
        """Return the content of a schema file; ``KeyError`` if there is none of that name."""
        return read_schema_file(self.path, self._schema, name)

    def close(self) -> None:
        """Wait for transfers in flight and close every file."""
        for encoded in self._encoded.values():
            encoded.close()
        for backend in self.backends:
            backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chunk_in(self, name: str, index: int, slot: int, checksums: Table) -> ChunkRef:
        """Return where one chunk of a record lies in ``slot``; ``checksums`` are the record's."""
        record = self._files.records(slot)[name]
        geometry = record.geometry
        shard, place = divmod(index, geometry.chunks_per_shard)
        found = self._files.locations(slot)[name][shard]
        return ChunkRef(
            index=index,
            path=found.path,
            drive=found.drive,
            offset=None if record.codec is not None else place * geometry.chunk_nbytes,
            nbytes=min(geometry.chunk_nbytes, record.nbytes - index * geometry.chunk_nbytes),
            crc=int(checksums[index]),
        )
