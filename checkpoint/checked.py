"""Reading records of a generation with every chunk compared with its checksum on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from checkpoint.schema import SCHEMA_FILE, Schema
from checkpoint.windows import aligned
from tiering.checksum import crc32c
from tiering.errors import CorruptionError
from tiering.records import CHUNK_LENGTH, Record

if TYPE_CHECKING:
    from tiering.opened import OpenStore
    from tiering.store import ChunkRef, StoreReader

MAX_CHUNK_NBYTES = 8 * CHUNK_LENGTH


def read_schema(store: OpenStore) -> Schema:
    """Return the schema of a store, whose records are those that it describes.

    Raises:
        CorruptionError: It is damaged, or the store holds something else.
    """
    names = set(store.schema_names())
    if SCHEMA_FILE not in names:
        raise CorruptionError(f"{store.path}: no {SCHEMA_FILE} among its schema files")
    schema = Schema.decode(store.schema_file(SCHEMA_FILE))
    if missing := sorted(schema.files.keys() - names):
        raise CorruptionError(f"{store.path}: side file {missing[0]} is not in the store")
    for what in unlike(schema, store.records):
        raise CorruptionError(f"{store.path}: {what}")
    return schema


def unlike(schema: Schema, found: Mapping[str, Record]) -> Iterator[str]:
    """Yield where records are not those that ``schema`` describes."""
    wanted = {record.name: record for record in schema.records()}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            yield f"record {name} is in the schema but not in the store"
        elif name not in wanted:
            yield f"record {name} is in the store but not in the schema"
        elif not agree(wanted[name], found[name]):
            yield f"record {name} is not what the schema says"


def agree(wanted: Record, found: Record) -> bool:
    """Whether a record holds what the schema says, however its shards are cut and encoded."""
    same = replace(found, codec=wanted.codec, shard_nbytes=wanted.shard_nbytes) == wanted
    return same and wanted.attributes == found.attributes


class CheckedReader:
    """Yields ranges of records out of verified chunks; keeps the last chunk. For one thread."""

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader
        self._buffer = aligned(MAX_CHUNK_NBYTES).data
        self._held: tuple[str, int] | None = None
        self._places: tuple[str, Sequence[ChunkRef]] = ("", ())

    def read(self, record: Record, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the ``nbytes`` from ``offset`` on; each piece is valid until the next is asked for.

        Raises:
            CorruptionError: A chunk differs from its checksum.
        """
        chunk_nbytes, end = record.geometry.chunk_nbytes, offset + nbytes
        while offset < end:
            chunk, start = divmod(offset, chunk_nbytes)
            stop = min(chunk_nbytes, start + end - offset)
            self._hold(record, chunk)
            yield self._buffer[start:stop]
            offset += stop - start

    def _hold(self, record: Record, chunk: int) -> None:
        if self._held == (record.name, chunk):
            return
        self._held = None
        offset = chunk * record.geometry.chunk_nbytes
        length = min(record.geometry.chunk_nbytes, record.nbytes - offset)
        self._reader.read(record.name, offset, self._buffer[:length])
        place = self._place(record.name, chunk)
        if (found := crc32c(self._buffer[:length])) != place.crc:
            raise place.damage(record.name, found)
        self._held = (record.name, chunk)

    def _place(self, name: str, chunk: int) -> ChunkRef:
        if self._places[0] != name:
            self._places = (name, tuple(self._reader.chunks(name)))
        return self._places[1][chunk]
