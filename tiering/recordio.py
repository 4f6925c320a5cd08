"""Bytes of records, by slot, name and offset: cut at shards, moved by the backends of drives."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tiering.backends.posix import address_of
from tiering.codecs import ShardSpec, shard_spec
from tiering.records import ALIGNMENT, Record, round_up
from tiering.slots import Locations, Shard
from tiering.waits import Waits

BOUNCE_NBYTES = 4 << 20
_ZEROS = memoryview(bytes(1 << 20))


class Backend(Protocol):
    """Moves bytes of files; buffers are borrowed until the future ends."""

    @property
    def alignment(self) -> int:
        """What offsets, lengths and addresses of buffers are multiples of."""

    def read(self, path: Path, offset: int, out: memoryview) -> Future[int]:
        """Fill ``out`` from ``offset``."""

    def write(self, path: Path, offset: int, data: memoryview) -> Future[int]:
        """Write ``data`` at ``offset``."""

    def forget(self, path: Path) -> None:
        """Close a file that is about to be removed."""


class ShardBackend(Backend, Protocol):
    """Moves decoded bytes of shards that are encoded; each is written whole, in order."""

    def describe(self, path: Path, spec: ShardSpec) -> None:
        """Say what a file holds before it is used."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes of a record that are to be read or written: ``view`` from ``offset`` on."""

    name: str
    offset: int
    view: memoryview


@dataclass(slots=True)
class _Batch:
    """Transfers that were submitted together, and the files that they work on."""

    futures: list[Future[int]] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    records: Mapping[str, Record]
    locations: Locations


class RecordFiles:
    """Blocking, thread-safe transfers of records. Aligned ones move without a copy.

    ``plain`` and ``encoded`` return the backend of a drive for shards without and with a codec.
    ``waits`` says which files each thread waits for.
    """

    def __init__(
        self, plain: Callable[[int], Backend], encoded: Callable[[int], ShardBackend]
    ) -> None:
        self._plain = plain
        self._encoded = encoded
        self.waits = Waits()
        self._slots: dict[int, _Slot] = {}
        self._local = threading.local()

    def attach(self, slot: int, records: Mapping[str, Record], locations: Locations) -> None:
        """Make the files of ``slot`` known, which holds ``records``."""
        self._slots[slot] = _Slot(records=records, locations=locations)
        for record in records.values():
            if record.codec is not None:
                for number, shard in enumerate(locations[record.name]):
                    self._encoded(shard.drive).describe(shard.path, shard_spec(record, number))

    def detach(self, slot: int) -> None:
        """Forget the files of ``slot``, which are about to be removed."""
        found = self._slots.pop(slot, None)
        if found is None:
            return
        for name, shards in found.locations.items():
            for shard in shards:
                self._backend(found.records[name], shard).forget(shard.path)

    def _backend(self, record: Record, shard: Shard) -> Backend:
        return (self._plain if record.codec is None else self._encoded)(shard.drive)

    def records(self, slot: int) -> Mapping[str, Record]:
        """Return what ``slot`` holds."""
        return self._slots[slot].records

    def locations(self, slot: int) -> Locations:
        """Return where the shards of ``slot`` lie."""
        return self._slots[slot].locations

    def read(self, slot: int, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the record's bytes at ``offset``, zeros beyond its valid bytes."""
        self.read_all(slot, [Transfer(name, offset, out)])

    def write(self, slot: int, name: str, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``, as ``write_all`` does."""
        self.write_all(slot, [Transfer(name, offset, data)])

    def read_all(self, slot: int, transfers: Sequence[Transfer]) -> None:
        """Fill every view with its record's bytes, zeros beyond the valid ones.

        All of them move at once; drives of different transfers work at the same time.
        """
        checked = [self._checked(slot, transfer) for transfer in transfers]
        heads = [self._aligned_nbytes(record, at, view) for record, at, view in checked]
        with self._together() as batch:
            for (record, offset, view), head in zip(checked, heads, strict=True):
                self._submit(batch, slot, record, offset, view[:head], write=False)
        for (record, offset, view), head in zip(checked, heads, strict=True):
            if head < len(view):
                self._read_bounced(slot, record, offset + head, view[head:])

    def write_all(self, slot: int, transfers: Sequence[Transfer]) -> None:
        """Write every view at its offset, which is a multiple of 4096; all of them at once.

        Lengths are multiples of 4096 or reach the record's end; what lies beyond the valid bytes
        is written as zeros. A record with a codec is written from its start to its end.
        """
        checked = [self._checked_write(slot, transfer) for transfer in transfers]
        heads = [self._aligned_nbytes(record, at, view) for record, at, view in checked]
        with self._together() as batch:
            for (record, offset, view), head in zip(checked, heads, strict=True):
                self._submit(batch, slot, record, offset, view[:head], write=True)
        for (record, offset, view), head in zip(checked, heads, strict=True):
            if head < len(view):
                self._write_bounced(slot, record, offset + head, view[head:])
            if record.codec is not None and view and offset + len(view) == record.nbytes:
                self._fill_last_chunk(slot, record)

    def _fill_last_chunk(self, slot: int, record: Record) -> None:
        """Write the zeros behind a record's end: its last chunk is encoded as a whole."""
        offset, geometry = record.nbytes, record.geometry
        while (left := geometry.chunk_count * geometry.chunk_nbytes - offset) > 0:
            piece = _ZEROS[: min(left, len(_ZEROS))]
            self._move(slot, record, offset, piece, write=True)
            offset += len(piece)

    def _checked(self, slot: int, transfer: Transfer) -> tuple[Record, int, memoryview]:
        name, offset, view = transfer.name, transfer.offset, memoryview(transfer.view).cast("B")
        record = self._slots[slot].records.get(name)
        if record is None:
            raise KeyError(f"no record {name!r} in this store")
        if offset < 0 or offset + len(view) > record.padded_nbytes:
            raise ValueError(
                f"{name}: {len(view)} B at offset {offset} reach past its {record.padded_nbytes} B"
            )
        return record, offset, view

    def _checked_write(self, slot: int, transfer: Transfer) -> tuple[Record, int, memoryview]:
        """Return a write without what lies beyond the record's valid bytes."""
        record, offset, view = self._checked(slot, transfer)
        whole = len(view) % ALIGNMENT == 0 or offset + len(view) >= record.nbytes
        if offset % ALIGNMENT or not whole:
            raise ValueError(
                f"{record.name}: {len(view)} B at offset {offset}: neither multiples of "
                f"{ALIGNMENT} nor up to the record's end at {record.nbytes} B"
            )
        return record, offset, view[: max(0, record.nbytes - offset)]

    @staticmethod
    def _aligned_nbytes(record: Record, offset: int, view: memoryview) -> int:
        """Return how much of ``view`` can move without a copy."""
        if record.codec is not None:  # it is encoded anyway
            return len(view)
        if len(view) < ALIGNMENT or offset % ALIGNMENT or address_of(view) % ALIGNMENT:
            return 0
        return len(view) - len(view) % ALIGNMENT

    @contextmanager
    def _together(self) -> Iterator[_Batch]:
        """Lend a batch and wait for all that is put into it; the first error is raised.

        Also after an error, and one of submitting: until they have ended the buffers are in use.
        """
        batch = _Batch()
        try:
            yield batch
        finally:
            with self.waits.on(batch.paths):
                wait(batch.futures)
        for future in batch.futures:
            future.result()

    def _move(
        self, slot: int, record: Record, offset: int, view: memoryview, *, write: bool
    ) -> None:
        with self._together() as batch:
            self._submit(batch, slot, record, offset, view, write=write)

    def _submit(
        self,
        batch: _Batch,
        slot: int,
        record: Record,
        offset: int,
        view: memoryview,
        *,
        write: bool,
    ) -> None:
        shards = self._slots[slot].locations[record.name]
        for segment in record.geometry.segments(offset, len(view)):
            shard = shards[segment.shard]
            backend = self._backend(record, shard)
            submit = backend.write if write else backend.read
            piece = view[segment.start : segment.start + segment.nbytes]
            batch.paths.append(shard.path)
            batch.futures.append(submit(shard.path, segment.offset, piece))

    def _read_bounced(self, slot: int, record: Record, offset: int, view: memoryview) -> None:
        with self._bounce() as bounce:
            while view:
                start = offset % ALIGNMENT
                count = min(len(view), len(bounce) - start)
                span = round_up(start + count, ALIGNMENT)
                self._move(slot, record, offset - start, bounce[:span], write=False)
                view[:count] = bounce[start : start + count]
                view, offset = view[count:], offset + count

    def _write_bounced(self, slot: int, record: Record, offset: int, view: memoryview) -> None:
        with self._bounce() as bounce:
            while view:
                count = min(len(view), len(bounce))
                span = round_up(count, ALIGNMENT)
                bounce[:count] = view[:count]
                bounce[count:span] = bytes(span - count)
                self._move(slot, record, offset, bounce[:span], write=True)
                view, offset = view[count:], offset + count

    @contextmanager
    def _bounce(self) -> Iterator[memoryview]:
        """Lend this thread's aligned buffer."""
        pages: mmap.mmap | None = getattr(self._local, "pages", None)
        if pages is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            pages = self._local.pages = mmap.mmap(-1, BOUNCE_NBYTES, flags=flags)
        with memoryview(pages) as view:
            yield view
