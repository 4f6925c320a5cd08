"""Comparing a generation with what was committed: its structure always, every byte on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.checked import MAX_CHUNK_NBYTES, read_schema
from checkpoint.schema import Schema, Tensor, Unit
from checkpoint.windows import aligned
from tiering.checksum import crc32c
from tiering.errors import CorruptionError, StorageError
from tiering.records import Record
from tiering.store import ChunkRef, StoreReader, open_reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong. Empty fields (None for numbers) do not apply to it."""

    what: str
    file: str = ""
    drive: int | None = None
    offset: int | None = None
    unit: str = ""
    role: str = ""
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a verification found; ``nbytes`` were read and compared with their checksums."""

    generation: int | None
    deep: bool
    records: int
    chunks: int
    nbytes: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def verify(
    store: Path,
    *,
    deep: bool = False,
    generation: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Findings:
    """Return what differs from what was committed, in the newest or the given generation.

    Not ``deep``: digests of manifest, metadata and side files, links, existence and length of
    every shard, at a cost that does not depend on the size of the model. ``deep``: also the
    checksum of every chunk.

    Raises:
        RefusedError: There is no store.
    """
    try:
        reader = open_reader(store, generation=generation)
    except CorruptionError as error:
        return _unreadable(str(error), deep=deep)
    with closing(reader):
        try:
            schema = read_schema(reader)
            found = [*_check_records(reader, schema), *_check_side_files(reader, schema)]
        except CorruptionError as error:
            return _unreadable(str(error), deep=deep)
        check = _Deep(reader, schema, on_progress)
        if deep:
            found += check.run()
        return Findings(
            generation=reader.manifest.generation,
            deep=deep,
            records=len(reader.records),
            chunks=check.chunks,
            nbytes=check.nbytes,
            findings=tuple(found),
        )


def _unreadable(what: str, *, deep: bool) -> Findings:
    finding = Finding(what=what)
    return Findings(generation=None, deep=deep, records=0, chunks=0, nbytes=0, findings=(finding,))


def _check_records(reader: StoreReader, schema: Schema) -> Iterator[Finding]:
    """Yield where the arrays are not those that the schema describes."""
    wanted = {record.name: record for record in schema.records()}
    for name in sorted(wanted.keys() | reader.records.keys()):
        if name not in reader.records:
            yield Finding(what=f"record {name} is in the schema but not in the store")
        elif name not in wanted:
            yield Finding(what=f"record {name} is in the store but not in the schema")
        elif not _agree(wanted[name], reader.records[name]):
            yield Finding(what=f"record {name} is not what the schema says")


def _agree(wanted: Record, found: Record) -> bool:
    """Whether a record holds what the schema says, however its shards are cut and encoded."""
    same = replace(found, codec=wanted.codec, shard_nbytes=wanted.shard_nbytes) == wanted
    return same and wanted.attributes == found.attributes


def _check_side_files(reader: StoreReader, schema: Schema) -> Iterator[Finding]:
    for name in schema.files:
        try:
            reader.schema_file(name)
        except KeyError:
            yield Finding(what=f"side file {name} is not in the store")
        except CorruptionError as error:
            yield Finding(what=str(error), file=name)


class _Deep:
    """Reads every chunk of every record."""

    def __init__(
        self, reader: StoreReader, schema: Schema, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self._reader = reader
        self._places = {
            record.name: (unit, str(role), record)
            for unit in schema.units
            for role in schema.roles(unit)
            for record in (schema.record(unit, role),)
            if record.name in reader.records
        }
        self._buffer = aligned(MAX_CHUNK_NBYTES).data
        self._on_progress = on_progress
        self.total = sum(record.nbytes for _, _, record in self._places.values())
        self.chunks = 0
        self.nbytes = 0

    def run(self) -> Iterator[Finding]:
        for unit, role, record in self._places.values():
            for chunk in self._reader.chunks(record.name):
                if what := self._check(record, chunk):
                    yield _chunk_finding(unit, role, record, chunk, what)
                self.chunks += 1
                self.nbytes += chunk.nbytes
                if self._on_progress:
                    self._on_progress(self.nbytes, self.total)

    def _check(self, record: Record, chunk: ChunkRef) -> str:
        data = self._buffer[: chunk.nbytes]
        try:
            self._reader.read(record.name, chunk.index * record.geometry.chunk_nbytes, data)
        except (StorageError, CorruptionError) as error:
            return str(error)
        found = crc32c(data)
        return "" if found == chunk.crc else f"crc32c {found:08x}, committed was {chunk.crc:08x}"


def _chunk_finding(unit: Unit, role: str, record: Record, chunk: ChunkRef, what: str) -> Finding:
    return Finding(
        what=what,
        file=str(chunk.path),
        drive=chunk.drive,
        offset=chunk.offset,
        unit=unit.name,
        role=role,
        tensors=tuple(tensor.name for tensor in _tensors_in(unit, record, chunk)),
    )


def _tensors_in(unit: Unit, record: Record, chunk: ChunkRef) -> Iterator[Tensor]:
    start = chunk.index * record.geometry.chunk_length
    stop = start + chunk.nbytes // record.itemsize
    return (tensor for tensor in unit.tensors if tensor.offset < stop and tensor.end > start)
