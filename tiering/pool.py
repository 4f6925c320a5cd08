"""The records of a training run, each in its tier: resident in memory, or streamed from drives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiering.arena import Arena
from tiering.backends.memory import MemoryBackend
from tiering.checksum import ChunkCrc, Table
from tiering.manifest import Generation
from tiering.read_checks import EveryRead, FirstPass
from tiering.recordio import Transfer
from tiering.records import ALIGNMENT, Record, Tier
from tiering.store import StoreWriter

_RESIDENT = frozenset({Tier.PINNED, Tier.CXL})


@dataclass(slots=True)
class Traffic:
    """Bytes that were moved from and to a tier since the pool was made; only grows."""

    read_bytes: int = 0
    written_bytes: int = 0


class Pool:
    """Serves the records of a store to one training run.

    Residents are views of the arena of their tier; all others are read from the input slot of the
    step and written to its output slot. ``read`` and ``write`` are thread-safe. With
    ``verify_reads`` every read is checked, else only the first pass over what was committed before.
    """

    def __init__(
        self,
        store: StoreWriter,
        placement: Mapping[str, Tier],
        arenas: Mapping[Tier, Arena],
        *,
        verify_reads: bool = False,
    ) -> None:
        self._store = store
        self._records = store.records
        self._residents: dict[str, MemoryBackend] = {}
        for tier in sorted(_RESIDENT & set(placement.values())):
            self._take(tier, [n for n, where in placement.items() if where is tier], arenas)
        self._input = store.manifest.slot
        self._output: int | None = None
        self._output_holds_step = False
        self._first_passes = {
            name: FirstPass(record, store)
            for name, record in store.records.items()
            if name not in self._residents
        }
        self._every_read = {
            name: EveryRead(record, store)
            for name, record in store.records.items()
            if verify_reads and name not in self._residents
        }
        self._applied: Mapping[str, Table] = {}
        self._opened_slot: int | None = store.manifest.slot
        self._guard = threading.Lock()
        self._traffic = {tier: Traffic() for tier in Tier}

    def _take(self, tier: Tier, names: Sequence[str], arenas: Mapping[Tier, Arena]) -> None:
        if tier not in arenas:
            raise ValueError(f"records are placed in {tier}, which has no arena: {names[0]}, ...")
        views = {
            Path(name): arenas[tier].take(name, self._records[name].padded_nbytes) for name in names
        }
        self._residents |= dict.fromkeys(names, MemoryBackend(tier, views))

    @property
    def traffic(self) -> Mapping[Tier, Traffic]:
        """Bytes moved per tier, before encoding; what residents load and flush is the drives'."""
        return self._traffic

    def load(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Fill the residents from the committed slot, every chunk checked.

        ``on_bytes`` is called with the size of each record that has arrived.

        Raises:
            CorruptionError: A chunk's crc32c differs.
        """
        for name, memory in self._residents.items():
            view = memory.view(Path(name))
            record = self._records[name]
            self._store.read(self._store.manifest.slot, name, 0, view)
            self._count(record, read=len(view))
            FirstPass(record, self._store).check(0, view)
            if on_bytes is not None:
                on_bytes(record.nbytes)

    def resident(self, name: str) -> memoryview | None:
        """Return the bytes of a resident record, padded to 4096; None for one on drives.

        It aliases the pool's memory: what is written into it is the record.
        """
        self._records[name]
        memory = self._residents.get(name)
        return None if memory is None else memory.view(Path(name))

    def begin_step(self) -> None:
        """Choose where this step reads from and where it writes to.

        The input is the working slot if it holds the previous step, else the committed one.
        """
        if self._store.working is None:
            self._input = self._store.manifest.slot
            self._output = self._store.begin()
            self._output_holds_step = False
        elif self._output_holds_step:
            self._input = self._store.working

    def read(self, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes of a record on drives, as the previous step left them.

        It is a piece of a pass over the record: those of one chunk come in order. A chunk is
        checked as it streams through, without ``verify_reads`` only in the first pass over what
        was committed before the run.

        Raises:
            CorruptionError: A chunk's crc32c differs; the content of ``out`` is undefined.
        """
        self.read_all([Transfer(name, offset, out)])

    def read_all(self, transfers: Sequence[Transfer]) -> None:
        """Read several records at once, as ``read`` does; their drives work at the same time.

        With ``verify_reads`` they are read one after another.
        """
        for t in transfers:
            self._count(self._records[t.name], read=memoryview(t.view).nbytes)
        if self._every_read:
            for t in transfers:
                check = self._every_read[t.name]
                check.stream(self._input, t.offset, t.view, self._table(t.name))
            return
        self._store.read_all(self._input, transfers)
        if self._input == self._opened_slot:
            for t in transfers:
                first_pass = self._first_passes[t.name]
                if not first_pass.done:
                    first_pass.check(t.offset, t.view)

    def gather(self, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes that are no piece of a pass; else as ``read``.

        With ``verify_reads`` the chunks that they lie in are read whole.
        """
        self._count(self._records[name], read=memoryview(out).nbytes)
        if self._every_read:
            self._every_read[name].gather(self._input, offset, out, self._table(name))
        else:
            self._store.read(self._input, name, offset, out)

    def _table(self, name: str) -> Table:
        """Return the checksums of what a step reads."""
        if self._input == self._store.working:
            return self._applied[name]
        return self._store.checksums(name)

    def check(self, name: str, bounce: memoryview) -> None:
        """Read a record on drives once in order, so that each of its chunks is checked.

        For records that a step reads here and there, where a chunk never comes whole.
        ``bounce`` is aligned memory of at least 4096 bytes; its content is lost.

        Raises:
            CorruptionError: A chunk's crc32c differs.
        """
        step = len(bounce) // ALIGNMENT * ALIGNMENT
        size = self._records[name].padded_nbytes
        for offset in range(0, size, step):
            self.read(name, offset, bounce[: min(step, size - offset)])

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write bytes of a record on drives as this step leaves them."""
        self.write_all([Transfer(name, offset, data)])

    def write_all(self, transfers: Sequence[Transfer]) -> None:
        """Write several records at once; their drives work at the same time."""
        self._store.write_all(self._required_output(), transfers)
        self._output_holds_step = True
        for transfer in transfers:
            self._count(self._records[transfer.name], written=memoryview(transfer.view).nbytes)

    def flush(self, name: str) -> Table:
        """Copy a resident record to the working slot; return the crc32c of its chunks."""
        record = self._records[name]
        view = self._residents[name].view(Path(name))
        self._store.write(self._required_output(), name, 0, view)
        self._count(record, written=len(view))
        crc = ChunkCrc(record)
        crc.feed(0, view)
        return crc.table()

    def applied(self, checksums: Mapping[str, Table]) -> None:
        """Hear that a step was written completely, with these checksums of what is on drives."""
        self._applied = checksums

    def commit(
        self,
        step: int,
        train_state: Mapping[str, Any],
        checksums: Mapping[str, Table],
        retain: int = 1,
    ) -> Generation:
        """Make what this step left the current generation; every resident was flushed."""
        generation = self._store.commit(
            step=step, train_state=train_state, checksums=checksums, retain=retain
        )
        self._opened_slot = None  # from here on every slot that is read was written by this run
        self._output = None
        return generation

    def close(self) -> None:
        """Let go of the residents, so that their arenas can be closed; the store stays open."""
        while self._residents:
            self._residents.popitem()[1].close()

    def _required_output(self) -> int:
        if self._output is None:
            raise ValueError("no step has begun: nothing may be written")
        return self._output

    def _count(self, record: Record, *, read: int = 0, written: int = 0) -> None:
        with self._guard:
            traffic = self._traffic[record.tier]
            traffic.read_bytes += read
            traffic.written_bytes += written
