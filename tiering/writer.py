"""Writing a store: a free slot is filled beside the committed one, then named by a new root."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tiering import fsops, space
from tiering.checksum import Table, zeros_table
from tiering.drive import Drive
from tiering.errors import MegatrainError, StorageError
from tiering.generations import (
    MARKER,
    checksums_of,
    publish,
    replace_root,
)
from tiering.lock import StoreLock
from tiering.manifest import Generation, Manifest, Root, digest, encode_table, entries
from tiering.opened import ChunkRef, Examined, OpenStore
from tiering.recordio import Transfer
from tiering.records import Record
from tiering.slot_table import Form, SlotTable
from tiering.slots import Places, allocated_nbytes, metadata_documents

_log = logging.getLogger(__name__)


class StoreWriter(OpenStore):
    """The one writer of a store. Made by ``open_writer`` and ``create_store``.

    Attributes:
        root: The durable root, None before the first commit.
        committed: What the generation is that was opened, or committed since; None before the
            first commit.
        working: The slot that is being filled, None between a commit and ``begin``.
        damaged: What is wrong with other listed generations; the next commit drops them.
        present: The records that need not be written after ``recast``: others use their files.
    """

    def __init__(
        self,
        *,
        path: Path,
        uuid: str,
        schema: str,
        form: Form,
        drives: Sequence[Drive],
        store_lock: StoreLock,
    ) -> None:
        super().__init__(
            path=path, schema=schema, records=form.records, drives=drives, writable=True
        )
        self.root: Root | None = None
        self.committed: Manifest | None = None
        self.working: int | None = None
        self.damaged: Mapping[int, MegatrainError] = {}
        self._uuid = uuid
        self._table: Table | None = None
        self._slots = SlotTable(path, self._files, self.drives, form)
        self._lock = store_lock
        self._recasting = self._reserving = False
        self.present: frozenset[str] = frozenset()
        self._written: dict[str, int] = {}
        self._written_guard = threading.Lock()
        self._failure: StorageError | None = None
        self._closed = False
        # Opened before anything is written: only then a sync reports every lost write to us.
        self._store_fd = (path, fsops.open_file(path, os.O_RDONLY | os.O_DIRECTORY))
        self._drive_fds = [(d.folder, store_lock.own(d.label)) for d in drives]

    def start(self, slots: int) -> None:
        """Give a store that was just made its ``slots`` slots; slot 0 is the working one."""
        self.ensure_slots(slots)
        self.working = 0

    def resume(self, root: Root, chosen: int, examined: Mapping[int, Examined]) -> None:
        """Take up the store that ``root`` names at a generation that was found whole."""
        whole = {number: found for number, item in examined.items() if (found := item.whole)}
        self.root = root
        self.committed, self._table = whole[chosen].manifest, whole[chosen].table
        self.damaged = {n: item.faults[0] for n, item in examined.items() if item.faults}
        for found in whole.values():
            self._slots.add(found.manifest.slot, found.records, found.locations)
        self._slots.update(root.generations)
        self._slots.find()
        fsops.unlink(self.path / MARKER, missing_ok=True)

    def say_run(self, run_id: str) -> None:
        """Name the run to whoever finds the store in use."""
        self._lock.say(run_id)

    # -- what is committed ---------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest:
        """What the current generation is; there must have been a commit."""
        if self.committed is None:
            raise ValueError(f"{self.path}: nothing is committed yet")
        return self.committed

    def checksums(self, name: str) -> Table:
        """Return the crc32c of every chunk of a record, as committed."""
        if self._table is None:
            raise ValueError(f"{self.path}: nothing is committed yet")
        return checksums_of(name, self.manifest, self._table)

    def chunks(self, name: str) -> Iterator[ChunkRef]:
        """Yield where every committed chunk of a record lies and what its crc32c has to be."""
        for index in range(self.records[name].geometry.chunk_count):
            yield self.chunk(name, index)

    def chunk(self, name: str, index: int) -> ChunkRef:
        """Return where one committed chunk lies and what its crc32c has to be."""
        return self.chunk_in(name, index, self.manifest.slot, self.checksums(name))

    @property
    def slots(self) -> frozenset[int]:
        """The complete slots."""
        return self._slots.complete

    @property
    def generations(self) -> tuple[Generation, ...]:
        """What the durable root lists, damaged ones too."""
        return self.root.generations if self.root else ()

    # -- generations -------------------------------------------------------------------------------

    def make_newest(self) -> Generation:
        """Make the generation that was opened the newest, and drop the damaged ones; durable.

        If others follow it, it is committed again: its manifest under the next number, which names
        it as its parent and takes its place among those that are listed. No bytes move.
        """
        root, manifest = self._settled_root(), self.manifest
        others = [
            g
            for g in root.generations
            if g.number != manifest.generation and g.number not in self.damaged
        ]
        self._say_what_is_dropped()
        if manifest.generation == root.latest.number:
            if self.damaged:
                self._replace_root(replace(root, generations=(*others, root.latest)))
            return root.latest
        again = replace(manifest, generation=root.latest.number + 1, parent=manifest.generation)
        assert self._table is not None  # there is a manifest
        self._publish(again, encode_table([self._table]), others)
        _log.warning(
            "%s: generation %d is generation %d (step %d) again",
            self.path,
            again.generation,
            manifest.generation,
            again.step,
        )
        return self._settled_root().latest

    def _say_what_is_dropped(self) -> None:
        for number, fault in self.damaged.items():
            _log.warning("generation %d of %s is dropped: %s", number, self.path, fault)

    def drop_generations(self, *, keep: int) -> None:
        """List no more than the last ``keep`` generations; durable."""
        root = self._settled_root()
        if root.generations[-keep:] != root.generations:
            self._replace_root(replace(root, generations=root.generations[-keep:]))

    def _settled_root(self) -> Root:
        """Return the root of a store in which nothing is being written."""
        self._require_usable()
        if self.root is None or self.working is not None:
            raise ValueError(f"{self.path}: slot {self.working} is being written")
        return self.root

    def _replace_root(self, root: Root) -> None:
        with self._fatal():
            replace_root(self.path, root)
            self._take_root(root)

    def _take_root(self, root: Root) -> None:
        self.root, self.damaged = root, {}
        self._slots.update(root.generations)

    # -- slots -------------------------------------------------------------------------------------

    def ensure_slots(self, count: int) -> None:
        """Create or repair slots until there are ``count`` complete ones; durable."""
        self._finish(self._slots.ensure(count))

    def fit_slots(self, count: int) -> None:
        """Have ``count`` slots, or one more than the generations need if that is more; durable.

        Others that are free are removed: no commit needs them, and they would be reserved too.
        """
        needed = len({generation.slot for generation in self.generations})
        count = max(count, needed + 1)
        self.drop_free_slots(keep=count - needed)
        self.ensure_slots(count)

    def _finish(self, slots: Sequence[int]) -> None:
        """Make slots that were just created durable, and then complete."""
        if slots:
            self._sync_all()
            with self._fatal():
                self._slots.finish(slots)

    def drop_free_slots(self, *, keep: int = 0) -> None:
        """Remove slots that no generation and no reader needs until ``keep`` of them are left."""
        if self.working is not None:
            raise ValueError(f"slot {self.working} is being written; commit it first")
        for slot in self._slots.removable(self.generations, keep=keep)[0]:
            self._slots.remove(slot)

    def free_slots(
        self, listed: Sequence[Generation], *, keep: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return what ``drop_free_slots`` would remove if only ``listed`` were, and what is held.

        The held ones would go too, if nobody read them.
        """
        return self._slots.removable(listed, keep=keep)

    def allocated_nbytes(self, slots: Iterable[int]) -> int:
        """Return what the files of these slots take up on the drives."""
        return sum(allocated_nbytes(slot, drives=self.drives) for slot in slots)

    def recast(self, records: Sequence[Record], places: Places, *, wait_s: float = 3600.0) -> int:
        """Make a slot for ``records`` the working slot and return it; all new in it is zero.

        They are those of the store, with other codecs or shards. From the next commit on every
        slot is cut like that; free slots of the old cut are removed, for the room.
        """
        slot = self._slot_to_recast(wait_s)
        self.records = {record.name: record for record in records}
        self._slots.form = Form(
            records=self.records, documents=metadata_documents(records), places=places
        )
        self._recasting = True
        self.drop_free_slots()
        self.present = self._slots.present()
        self._slots.make(slot)
        self._finish([slot])
        self.working, self._written = slot, {}
        return slot

    def _slot_to_recast(self, wait_s: float) -> int:
        self._require_ready_to_begin()
        if self._slots.all_needed:
            return self._slots.unused_number()
        return self._slots.await_free(wait_s)

    def reserve(self) -> None:
        """Give every record that changes its blocks, in every slot; what is read stays the same.

        Raises:
            CapacityError: A drive is too small; the message is a table of need and free bytes.
        """
        self._reserve(self._slots.ready)
        self._reserving = True

    def _reserve(self, slots: Iterable[int]) -> None:
        locations = [self._files.locations(slot) for slot in sorted(slots)]
        space.reserve(list(self.records.values()), locations, self.drives)

    def begin(self, *, wait_s: float = 3600.0) -> int:
        """Make a free slot the working slot and return it; its content is arbitrary.

        Waits for the readers of dropped generations if they hold every free slot. A slot that is
        damaged, or cut otherwise than the next commit, is made anew.

        Raises:
            RefusedError: There are too few slots.
            LockedError: Readers still held the slots after ``wait_s`` seconds.
        """
        self._require_ready_to_begin()
        slot = self._slots.await_free(wait_s)
        if slot not in self._slots.ready:
            self._slots.make(slot)
            self._finish([slot])
            if self._reserving:
                self._reserve([slot])
        self.working, self._written = slot, {}
        return slot

    def _require_ready_to_begin(self) -> None:
        self._require_usable()
        if self.working is not None:
            raise ValueError(f"slot {self.working} is being written; commit it first")
        if self.root and self.manifest.generation != self.root.latest.number:
            raise ValueError(f"generation {self.manifest.generation} is not the newest")

    # -- bytes ---------------------------------------------------------------------------------

    def read(self, slot: int, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes of a record in ``slot``; aligned buffers are not copied."""
        self._files.read(slot, name, offset, out)

    def read_all(self, slot: int, transfers: Sequence[Transfer]) -> None:
        """Fill several buffers at once, so that their drives work at the same time."""
        self._files.read_all(slot, transfers)

    def write(self, slot: int, name: str, offset: int, data: memoryview) -> None:
        """Write into the working slot, as ``write_all`` does."""
        self.write_all(slot, [Transfer(name, offset, data)])

    def write_all(self, slot: int, transfers: Sequence[Transfer]) -> None:
        """Write into the working slot; durable and visible with the next commit.

        Offsets are multiples of 4096, and lengths too unless they reach the record's end. Buffers
        that are multiples of 4096 are not copied. A failure ends the use of this writer: what the
        slot holds is unknown.
        """
        if slot != self.working:
            raise ValueError(f"slot {slot} is not the working slot ({self.working})")
        for transfer in transfers:
            shared = self.records[transfer.name].shared
            new = self._recasting and transfer.name not in self.present
            if shared and self.committed is not None and not new:
                raise ValueError(f"{transfer.name} is shared by all slots and never changes")
        with self._fatal():
            self._files.write_all(slot, transfers)
        for transfer in transfers:
            valid = self.records[transfer.name].nbytes - transfer.offset
            self._count_written(transfer.name, min(memoryview(transfer.view).nbytes, valid))

    def leave_zero(self, name: str, nbytes: int) -> None:
        """Take ``nbytes`` of a record as written: they are zero since its slot was made."""
        if not self._recasting or self.records[name].codec is not None:
            raise ValueError(f"{name}: slot {self.working} was not made for this commit")
        self._count_written(name, nbytes)

    def _count_written(self, name: str, nbytes: int) -> None:
        with self._written_guard:
            self._written[name] = self._written.get(name, 0) + max(0, nbytes)

    # -- commit --------------------------------------------------------------------------------

    def commit(
        self,
        *,
        step: int,
        train_state: Mapping[str, Any],
        checksums: Mapping[str, Table],
        retain: int = 1,
    ) -> Generation:
        """Make the working slot the current generation; durable when this returns.

        ``checksums`` holds a crc32c per chunk of every record that was written. The last
        ``retain`` generations stay listed; the slots of the others become free.

        Raises:
            StorageError: It is not known which generation survives; open the store again.
        """
        self._require_usable()
        if self.working is None or retain < 1:
            raise ValueError(f"nothing to commit: working slot {self.working}, retain {retain}")
        tables = [self._table_of(record, checksums) for record in self.records.values()]
        table = encode_table(tables)
        manifest = self._next_manifest(self.working, step, train_state, digest(table))
        before = self.root.generations if self.root else ()
        whole = [g for g in before if g.number not in self.damaged]
        self._say_what_is_dropped()
        # Bytes before names: a manifest must promise nothing that a power cut can undo.
        self._sync_drives()
        generation = self._publish(manifest, table, whole[-(retain - 1) :] if retain > 1 else ())
        self._table = np.concatenate(tables).astype(np.uint32)
        return generation

    def _publish(
        self, manifest: Manifest, table: bytes, others: Sequence[Generation]
    ) -> Generation:
        """Make ``manifest`` the newest generation, listed behind ``others``; durable."""
        data = manifest.encode()
        generation = Generation(
            number=manifest.generation,
            parent=manifest.parent,
            slot=manifest.slot,
            step=manifest.step,
            digest=digest(data),
        )
        root = Root(
            uuid=self._uuid,
            drives={drive.number: drive.share for drive in self.drives},
            schema=self._schema,
            generations=(*others, generation),
        )
        with self._fatal():
            publish(self.path, root, data, table)
            fsops.unlink(self.path / MARKER, missing_ok=True)
            self.committed, self.working, self._recasting = manifest, None, False
            self._take_root(root)
        return generation

    def _table_of(self, record: Record, checksums: Mapping[str, Table]) -> Table:
        given = checksums.get(record.name)
        written = self._written.get(record.name, 0)
        if self.committed is None and given is None and not written:
            return zeros_table(record)
        if record.shared and self.committed is not None:
            return self.checksums(record.name)
        if self.committed is not None and written < record.nbytes:
            raise ValueError(
                f"{record.name}: {written} of {record.nbytes} B were written to slot {self.working}"
            )
        if given is None or len(given) != record.geometry.chunk_count:
            found = "none" if given is None else len(given)
            raise ValueError(
                f"{record.name}: {found} checksums for {record.geometry.chunk_count} chunks"
            )
        return given

    def _next_manifest(
        self, slot: int, step: int, train_state: Mapping[str, Any], table_digest: str
    ) -> Manifest:
        parent = self.root.latest.number if self.root else None
        return Manifest(
            uuid=self._uuid,
            generation=(parent or 0) + 1,
            parent=parent,
            slot=slot,
            step=step,
            records=entries(list(self.records.values()), self._encoded_lengths(slot)),
            metadata=self._slots.form.digests,
            table_digest=table_digest,
            train_state=train_state,
        )

    def _encoded_lengths(self, slot: int) -> Mapping[str, tuple[int, ...]]:
        """Return the lengths that the files of records with a codec have now."""
        locations = self._files.locations(slot)
        return {
            name: tuple(shard.path.stat().st_size for shard in locations[name])
            for name, record in self.records.items()
            if record.codec is not None
        }

    def _sync_drives(self) -> None:
        with self._fatal():
            self._sync(self._drive_fds)

    def _sync_all(self) -> None:
        with self._fatal():
            self._sync([*self._drive_fds, self._store_fd])

    def _sync(self, targets: Sequence[tuple[Path, int]]) -> None:
        """Make what was written to these file systems durable, each of them once."""
        synced = set()
        for path, fd in targets:
            device = os.fstat(fd).st_dev
            if device not in synced:
                fsops.sync_drive(fd, path)
            synced.add(device)

    # -- failure and end -----------------------------------------------------------------------

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self._failure = self._failure or error
            raise

    def _require_usable(self) -> None:
        if self._failure is not None:
            raise StorageError(
                "go on after a failure on",
                self._failure.path,
                errno=self._failure.errno,
                hint="open the store again to see which generation it has",
            ) from self._failure

    def close(self) -> None:
        """Close every file and unlock the store; what was not committed is garbage."""
        if self._closed:
            return
        self._closed = True
        super().close()
        os.close(self._store_fd[1])
        self._lock.close()
