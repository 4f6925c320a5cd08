"""Bytes of records, by slot, name and offset: cut at shards, moved by one backend per drive."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tiering.backends.posix import address_of
from tiering.records import ALIGNMENT, Record, round_up
from tiering.slots import Locations

BOUNCE_NBYTES = 4 << 20


class Backend(Protocol):
    """Moves bytes of files; buffers are borrowed until the future ends."""

    def read(self, path: Path, offset: int, out: memoryview) -> Future[int]:
        """Fill ``out`` from ``offset``."""

    def write(self, path: Path, offset: int, data: memoryview) -> Future[int]:
        """Write ``data`` at ``offset``."""

    def forget(self, path: Path) -> None:
        """Close a file that is about to be removed."""


class RecordFiles:
    """Blocking, thread-safe transfers of records. Aligned ones move without a copy."""

    def __init__(self, records: Mapping[str, Record], backends: Mapping[int, Backend]) -> None:
        self._records = records
        self._backends = backends
        self._slots: dict[int, Locations] = {}
        self._local = threading.local()

    def attach(self, slot: int, locations: Locations) -> None:
        """Make the files of ``slot`` known."""
        self._slots[slot] = locations

    def detach(self, slot: int) -> None:
        """Forget the files of ``slot``, which are about to be removed."""
        for shards in self._slots.pop(slot, {}).values():
            for shard in shards:
                self._backends[shard.drive].forget(shard.path)

    def locations(self, slot: int) -> Locations:
        """Return where the shards of ``slot`` lie."""
        return self._slots[slot]

    def read(self, slot: int, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the record's bytes at ``offset``, zeros beyond its valid bytes."""
        view = memoryview(out).cast("B")
        record = self._checked(name, offset, len(view))
        head = self._aligned_nbytes(offset, view)
        self._move(slot, record, offset, view[:head], write=False)
        if head < len(view):
            self._read_bounced(slot, record, offset + head, view[head:])

    def write(self, slot: int, name: str, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``, which is a multiple of 4096.

        The length is a multiple of 4096 or reaches the record's end; what lies beyond the valid
        bytes is written as zeros.
        """
        view = memoryview(data).cast("B")
        record = self._checked(name, offset, len(view))
        stop = offset + len(view)
        if offset % ALIGNMENT or (len(view) % ALIGNMENT and stop < record.nbytes):
            raise ValueError(
                f"{name}: {len(view)} B at offset {offset}: neither multiples of {ALIGNMENT} "
                f"nor up to the record's end at {record.nbytes} B"
            )
        view = view[: max(0, record.nbytes - offset)]
        head = self._aligned_nbytes(offset, view)
        self._move(slot, record, offset, view[:head], write=True)
        if head < len(view):
            self._write_bounced(slot, record, offset + head, view[head:])

    def _checked(self, name: str, offset: int, nbytes: int) -> Record:
        record = self._records.get(name)
        if record is None:
            raise KeyError(f"no record {name!r} in this store")
        if offset < 0 or offset + nbytes > record.padded_nbytes:
            raise ValueError(
                f"{name}: {nbytes} B at offset {offset} reach past its {record.padded_nbytes} B"
            )
        return record

    @staticmethod
    def _aligned_nbytes(offset: int, view: memoryview) -> int:
        """Return how much of ``view`` can move without a copy."""
        if len(view) < ALIGNMENT or offset % ALIGNMENT or address_of(view) % ALIGNMENT:
            return 0
        return len(view) - len(view) % ALIGNMENT

    def _move(
        self, slot: int, record: Record, offset: int, view: memoryview, *, write: bool
    ) -> None:
        shards = self._slots[slot][record.name]
        futures: list[Future[int]] = []
        try:
            for segment in record.geometry.segments(offset, len(view)):
                shard = shards[segment.shard]
                backend = self._backends[shard.drive]
                submit = backend.write if write else backend.read
                piece = view[segment.start : segment.start + segment.nbytes]
                futures.append(submit(shard.path, segment.offset, piece))
        finally:
            wait(futures)  # all of them, also after an error: until then the buffer is in use
        for future in futures:
            future.result()

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
