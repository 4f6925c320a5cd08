"""Giving a store's records another codec or another size of shards: a new slot, then a commit."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from checkpoint.checked import MAX_CHUNK_NBYTES
from checkpoint.windows import aligned
from tiering.checksum import crc32c
from tiering.codecs import Codec
from tiering.errors import UsageError
from tiering.records import ALIGNMENT, Record, round_up
from tiering.shares import spread
from tiering.store import ChunkRef, StoreWriter, open_writer

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How shards are to be: None keeps what a record has; a ``codec`` of "" means none.

    ``records`` are shell patterns of the names of records that this is for.
    """

    codec: str | None = None
    shard_nbytes: int | None = None
    records: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        if self.codec:
            Codec.named(self.codec)

    def apply(self, record: Record) -> Record:
        """Return ``record`` cut like this, if it is one of them."""
        if not any(fnmatch.fnmatchcase(record.name, pattern) for pattern in self.records):
            return record
        return replace(
            record,
            codec=record.codec if self.codec is None else self.codec or None,
            shard_nbytes=self.shard_nbytes or record.shard_nbytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoded:
    """What was done: the commit, how many records changed, and the bytes of all shard files."""

    generation: int
    records: int
    nbytes_before: int
    nbytes_after: int


def recode(store: Path, cut: Cut, *, on_progress: Progress | None = None) -> Recoded | None:
    """Commit the newest generation once more with its shards cut anew; None if they are so already.

    The content does not change; every chunk is checked on the way. Until the commit the store is
    as it was, and what was written is garbage that the next writer removes. Memory for a chunk.

    Raises:
        UsageError: No record has a name like those of ``cut``.
        LockedError: The store is being written.
        CapacityError: The drives have no room for another slot.
        CorruptionError: A chunk differs from its checksum; nothing was committed.
    """
    with open_writer(store, run_id="shard") as writer:
        before = writer.records
        after = [cut.apply(record) for record in before.values()]
        changed = sum(before[record.name] != record for record in after)
        if not changed:
            _require_match(cut, before)
            return None
        nbytes_before = _nbytes(writer)
        manifest = writer.manifest
        shares = {drive.number: drive.share for drive in writer.drives}
        slot = writer.recast(after, spread(after, shares))
        _Copy(writer, manifest.slot, slot, on_progress).run(before)
        assert writer.root is not None  # it was opened
        generation = writer.commit(
            step=manifest.step,
            train_state=manifest.train_state,
            checksums={name: writer.checksums(name) for name in before},
            retain=len(writer.root.generations),
        )
        writer.drop_free_slots()
        return Recoded(
            generation=generation.number,
            records=changed,
            nbytes_before=nbytes_before,
            nbytes_after=_nbytes(writer),
        )


def _require_match(cut: Cut, records: Mapping[str, Record]) -> None:
    for pattern in cut.records:
        if not fnmatch.filter(records, pattern):
            raise UsageError(f"--records {pattern}: no record is called so; inspect lists them")


def _nbytes(writer: StoreWriter) -> int:
    """Return what the files of the newest generation are long."""
    return sum(sum(entry.files) for entry in writer.manifest.records.values())


class _Copy:
    """Copies every record from one slot to another, chunk by chunk; owns the memory for one."""

    def __init__(
        self, writer: StoreWriter, source: int, target: int, on_progress: Progress | None
    ) -> None:
        self._writer = writer
        self._source = source
        self._target = target
        self._on_progress = on_progress
        self._buffer = aligned(MAX_CHUNK_NBYTES).data
        self._done = 0

    def run(self, records: Mapping[str, Record]) -> None:
        """Copy ``records``, as they are in the source."""
        total = sum(record.nbytes for record in records.values())
        for name in records:
            for chunk in self._writer.chunks(name):
                self._copy(name, chunk)
                self._done += chunk.nbytes
                if self._on_progress:
                    self._on_progress(self._done, total)

    def _copy(self, name: str, chunk: ChunkRef) -> None:
        record = self._writer.records[name]
        offset = chunk.index * record.geometry.chunk_nbytes
        data = self._buffer[: chunk.nbytes]
        present = name in self._writer.present  # some generation needs the file as it is
        slot = self._target if present else self._source
        self._writer.read(slot, name, offset, data)
        if (found := crc32c(data)) != chunk.crc:
            table = self._writer.checksums(name)
            raise self._writer.chunk_in(name, chunk.index, slot, table).damage(name, found)
        if present:
            return
        if record.codec is None and not np.frombuffer(data, np.uint8).any():
            self._writer.leave_zero(name, chunk.nbytes)  # a hole stays one
            return
        padded = self._buffer[: round_up(chunk.nbytes, ALIGNMENT)]
        padded[chunk.nbytes :] = bytes(len(padded) - chunk.nbytes)
        self._writer.write(self._target, name, offset, padded)
