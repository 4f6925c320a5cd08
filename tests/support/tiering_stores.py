"""Small stores whose content is a function of a seed."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tiering import records as records_module
from tiering.bandwidth import Rates
from tiering.checksum import ChunkCrc, Table
from tiering.manifest import Generation
from tiering.records import Record
from tiering.store import StoreReader, StoreWriter, create_store

# Lengths that are no multiple of a chunk, of a page or of a shard; one record fits them all.
SHARD_NBYTES = 32 << 10


def small_record(name: str, dtype: str, length: int, **more: Any) -> Record:
    """Return a record whose shards are small enough for a test."""
    return Record(name=name, dtype=dtype, length=length, shard_nbytes=SHARD_NBYTES, **more)


RECORDS = (
    small_record("u0.weights", "bfloat16", 3 * 4096 + 100),
    small_record("u0.master", "float32", 9 * 4096 + 1, attributes={"unit": "u0"}),
    small_record("even", "float32", 8 * 4096),
    small_record("tiny", "uint8", 1),
    small_record("carried", "float32", 77, shared=True),
)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Lend a folder in memory, where a sync costs nothing: a kill loses nothing there either."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        yield Path(folder)


@contextmanager
def small_chunks(chunk_length: int = 4096) -> Iterator[None]:
    """Cut records into chunks that are small enough for a test."""
    before = records_module.CHUNK_LENGTH
    records_module.CHUNK_LENGTH = chunk_length
    try:
        yield
    finally:
        records_module.CHUNK_LENGTH = before


@functools.lru_cache(maxsize=256)
def content(record: Record, seed: int) -> np.ndarray:
    """Return the bytes of a record in the state ``seed``; a shared one has one state."""
    key = [0 if record.shared else seed, *record.name.encode()]
    data = np.random.default_rng(key).integers(0, 256, record.nbytes, dtype=np.uint8)
    data.flags.writeable = False
    return data


def put(writer: StoreWriter, slot: int, record: Record, data: np.ndarray) -> Table:
    """Write a whole record and return its checksums."""
    writer.write(slot, record.name, 0, memoryview(data))
    crc = ChunkCrc(record)
    crc.feed(0, memoryview(data))
    return crc.table()


def fill(writer: StoreWriter, seed: int, *, retain: int = 1) -> Generation:
    """Write the state ``seed`` into the working slot and commit it as step ``seed``."""
    if writer.working is None:
        writer.begin(wait_s=0)
    assert writer.working is not None
    fresh = writer.committed is None
    checksums = {
        record.name: put(writer, writer.working, record, content(record, seed))
        for record in writer.records.values()
        if fresh or not record.shared
    }
    return writer.commit(step=seed, train_state={"seed": seed}, checksums=checksums, retain=retain)


def make_store(
    path: Path,
    *,
    seed: int = 1,
    records: Sequence[Record] = RECORDS,
    drives: Sequence[Path] = (),
    slots: int = 2,
) -> Path:
    """Create a store whose one generation is the state ``seed``."""
    files = {"schema.json": b"{}", "chat/template.jinja": b"\xff\x00"}
    with create_store(
        path,
        records=records,
        schema_files=files,
        drives=drives,
        slots=slots,
        measure=equal_rates,
    ) as writer:
        fill(writer, seed)
    return path


def equal_rates(folder: Path) -> Rates:
    """Take all drives for equally fast, so that places do not depend on what a drive does."""
    return Rates(read_bytes_per_s=1e9, written_bytes_per_s=1e9)


def read_all(reader: StoreReader) -> Mapping[str, np.ndarray]:
    """Return the bytes of every record."""
    return {name: read_record(reader, name) for name in reader.records}


def read_record(reader: StoreReader, name: str) -> np.ndarray:
    out = np.full(reader.records[name].nbytes, 0xAA, np.uint8)
    reader.read(name, 0, memoryview(out))
    return out


def assert_state(reader: StoreReader, seed: int) -> None:
    """Check every byte, every checksum and the train state of a generation."""
    assert reader.manifest.step == seed
    assert reader.manifest.train_state == {"seed": seed}
    for name, found in read_all(reader).items():
        record = reader.records[name]
        np.testing.assert_array_equal(found, content(record, seed), err_msg=name)
        crc = ChunkCrc(record)
        crc.feed(0, memoryview(found))
        np.testing.assert_array_equal(crc.table(), reader.checksums(name), err_msg=name)
