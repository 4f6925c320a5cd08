"""Comparing generations with what was committed: their structure always, every byte on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.checked import MAX_CHUNK_NBYTES, agree
from checkpoint.schema import SCHEMA_FILE, Schema, Tensor
from checkpoint.windows import aligned
from tiering.checksum import crc32c
from tiering.drives import open_drives
from tiering.errors import CorruptionError, MegatrainError, RefusedError, StorageError
from tiering.generations import find_generation, read_root
from tiering.manifest import Generation, Root
from tiering.records import Record
from tiering.schema_files import read_schema_file
from tiering.soundness import store_faults
from tiering.store import ChunkRef, StoreReader, open_damaged
from tiering.tails import wrong_tail

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong. Empty fields (None for numbers) do not apply to it.

    Without a ``generation`` it is wrong with the whole store. What is wrong lies in the ``nbytes``
    from ``offset`` on; without ``nbytes`` it begins there, without ``offset`` it is the file, for
    which one digest vouches as a whole. ``tensors`` are those of which something lies there.
    """

    what: str
    generation: int | None = None
    file: str = ""
    drive: int | None = None
    offset: int | None = None
    nbytes: int | None = None
    unit: str = ""
    role: str = ""
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How far one generation was looked at; ``nbytes`` were compared with their checksums."""

    generation: int
    step: int
    ok: bool
    records: int
    chunks: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a verification found, and in how much."""

    deep: bool
    generations: tuple[Verified, ...]
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
    on_progress: OnProgress | None = None,
) -> Findings:
    """Return what differs from what was committed, in every or in the given generation.

    Not ``deep``: digests of root, manifests, metadata and side files, drives, links, existence and
    length of every shard, at a cost that does not depend on the size of the model. ``deep``: also
    the checksum of every chunk, and the bytes of shards that no checksum covers. A generation that
    is dropped meanwhile is left out; if all are, those that took their place are looked at. What
    cannot be read is found like what is damaged.

    Raises:
        RefusedError: There is no store, or no such generation, or it was dropped meanwhile.
        StorageError: The root cannot be read.
    """
    while True:
        found = _verify(store, deep, generation, on_progress)
        if found is not None:
            return found


def _verify(
    store: Path, deep: bool, generation: int | None, on_progress: OnProgress | None
) -> Findings | None:
    """Return the findings, or None if every generation was dropped before it was looked at."""
    try:
        root = read_root(store)
    except CorruptionError as error:
        return Findings(deep=deep, generations=(), findings=(_finding(error, None, None),))
    listed = root.generations
    if generation is not None:
        listed = (find_generation(store, root, generation),)
    faults = [_finding(fault, None, None) for fault in store_faults(store, root)]
    if not _drives_are_there(store, root):
        return Findings(deep=deep, generations=(), findings=tuple(faults))
    work = _Work(store, _schema(store, root), deep, on_progress)
    looked_at = tuple(filter(None, (work.examine(item, len(listed)) for item in listed)))
    if not looked_at:
        return None
    return Findings(
        deep=deep,
        generations=looked_at,
        findings=(*faults, *work.findings),
    )


def _drives_are_there(store: Path, root: Root) -> bool:
    try:
        open_drives(store, root.uuid, root.drives)
    except (CorruptionError, StorageError):
        return False
    return True


def _schema(store: Path, root: Root) -> Schema | None:
    """Return the schema; None if it is damaged, which is found elsewhere."""
    try:
        return Schema.decode(read_schema_file(store, root.schema, SCHEMA_FILE))
    except (CorruptionError, StorageError, KeyError):
        return None


def _finding(fault: MegatrainError, generation: int | None, schema: Schema | None) -> Finding:
    if not isinstance(fault, CorruptionError | StorageError):
        return Finding(what=str(fault), generation=generation)
    unit, _, role = fault.record.rpartition(".")
    finding = Finding(
        what=str(fault),
        generation=generation,
        unit=unit,
        role=role,
        tensors=tuple(tensor.name for tensor in _tensors_of(schema, fault.record)),
    )
    if isinstance(fault, StorageError):
        return replace(finding, file=str(fault.path))
    return replace(
        finding, file=fault.file, drive=fault.drive, offset=fault.offset, nbytes=fault.nbytes
    )


def _tensors_of(schema: Schema | None, record: str) -> Sequence[Tensor]:
    """Return what a record holds, as far as the schema can be read."""
    name = record.rpartition(".")[0]
    units = schema.units if schema else ()
    return next((unit.tensors for unit in units if unit.name == name), ())


class _Work:
    """Looks at one generation after the other; owns the memory for a chunk."""

    def __init__(
        self, store: Path, schema: Schema | None, deep: bool, on_progress: OnProgress | None
    ) -> None:
        self.findings: list[Finding] = []
        self._store = store
        self._schema = schema
        self._deep = deep
        self._on_progress = on_progress
        self._done = 0
        self._buffer = aligned(MAX_CHUNK_NBYTES).data if deep else memoryview(b"")

    def examine(self, listed: Generation, count: int) -> Verified | None:
        """Look at one of ``count`` generations; None if it is not there any more."""
        number, before = listed.number, len(self.findings)
        try:
            reader, faults = open_damaged(self._store, generation=number)
        except CorruptionError:
            raise
        except RefusedError:
            return None
        except StorageError as error:
            reader, faults = None, (error,)
        self.findings += [_finding(fault, number, self._schema) for fault in faults]
        records = chunks = nbytes = 0
        if reader is not None:
            with closing(reader):
                self.findings += self._unlike_the_schema(reader, number, faults)
                records = len(reader.records)
                if self._deep:
                    chunks, nbytes = self._read(reader, number, count)
        return Verified(
            generation=number,
            step=listed.step,
            ok=len(self.findings) == before,
            records=records,
            chunks=chunks,
            nbytes=nbytes,
        )

    def _unlike_the_schema(
        self, reader: StoreReader, number: int, faults: Sequence[MegatrainError]
    ) -> Iterator[Finding]:
        """Yield where arrays without ``faults`` are not those that the schema describes."""
        damaged = {f.record for f in faults if isinstance(f, CorruptionError | StorageError)}
        found = {k: v for k, v in reader.records.items() if k not in damaged}
        wanted = {record.name: record for record in self._schema.records()} if self._schema else {}
        committed = reader.manifest.records
        for name in sorted(wanted.keys() | committed.keys()) if wanted else ():
            if name not in committed:
                what = f"record {name} is in the schema but not in the store"
            elif name not in wanted:
                what = f"record {name} is in the store but not in the schema"
            elif name in found and not agree(wanted[name], found[name]):
                what = f"record {name} is not what the schema says"
            else:
                continue
            yield Finding(what=what, generation=number)

    # -- every byte --------------------------------------------------------------------------------

    def _read(self, reader: StoreReader, number: int, count: int) -> tuple[int, int]:
        """Compare every chunk and every tail; return how many chunks and bytes that were."""
        chunks = nbytes = 0
        total = self._done + count * sum(record.nbytes for record in reader.records.values())
        for record in reader.records.values():
            for chunk in reader.chunks(record.name):
                if fault := self._wrong_chunk(reader, record, chunk):
                    self.findings.append(self._placed(fault, record, chunk, number))
                chunks, nbytes = chunks + 1, nbytes + chunk.nbytes
                self._done += chunk.nbytes
                if self._on_progress:
                    self._on_progress(self._done, max(total, self._done))
            self.findings += self._tails(reader, record, number)
        return chunks, nbytes

    def _wrong_chunk(
        self, reader: StoreReader, record: Record, chunk: ChunkRef
    ) -> CorruptionError | None:
        data = self._buffer[: chunk.nbytes]
        try:
            reader.read(record.name, chunk.index * record.geometry.chunk_nbytes, data)
            found = crc32c(data)
            if found == chunk.crc:
                return None
            offset, nbytes = reader.span(record.name, chunk.index) or (None, None)
        except CorruptionError as error:
            return error
        except StorageError as error:
            return CorruptionError(str(error), offset=chunk.offset)
        what = f"chunk {chunk.index}: crc32c {found:08x}, committed was {chunk.crc:08x}"
        return CorruptionError(what, offset=offset, nbytes=nbytes)

    def _placed(
        self, fault: CorruptionError, record: Record, chunk: ChunkRef, number: int
    ) -> Finding:
        start = chunk.index * record.geometry.chunk_length
        tensors = self._tensors(record, start, start + chunk.nbytes // record.itemsize)
        finding = _finding(fault, number, None)
        unit, _, role = record.name.rpartition(".")
        return replace(
            finding,
            file=str(chunk.path),
            drive=chunk.drive,
            unit=unit,
            role=role,
            tensors=tuple(tensor.name for tensor in tensors),
        )

    def _tensors(self, record: Record, start: int, stop: int) -> list[Tensor]:
        """Return what lies in elements ``[start, stop)`` of a record."""
        tensors = _tensors_of(self._schema, record.name)
        return [t for t in tensors if t.offset < stop and t.end > start]

    def _tails(self, reader: StoreReader, record: Record, number: int) -> Iterator[Finding]:
        if record.codec is not None:  # its own checksums cover every byte
            return
        for shard, place in enumerate(reader.shards(record.name)):
            try:
                wrong = wrong_tail(record, shard, place.path)
            except StorageError as error:
                wrong = error.offset, str(error)
            if wrong:
                unit, _, role = record.name.rpartition(".")
                yield Finding(
                    what=wrong[1],
                    generation=number,
                    file=str(place.path),
                    drive=place.drive,
                    offset=wrong[0],
                    unit=unit,
                    role=role,
                )
