"""Writing a store: a free slot is filled beside the committed one, then named by a new root."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tiering import fsops, lock, space
from tiering.checksum import Table, zeros_table
from tiering.drives import Drive, open_drives
from tiering.errors import CorruptionError, LockedError, RefusedError, StorageError
from tiering.generations import MARKER, ROOT, checksums_of, publish, read_root, reap
from tiering.lock import StoreLock
from tiering.manifest import (
    Generation,
    Manifest,
    Root,
    digest,
    encode_table,
    entries,
    plain_lengths,
)
from tiering.opened import ChunkRef, OpenGeneration, OpenStore, open_generation
from tiering.records import Record
from tiering.slots import (
    Places,
    create_slot,
    delete_slot,
    existing_slots,
    finish_slot,
    locate,
    metadata_documents,
    places_of,
    read_metadata,
)

_log = logging.getLogger(__name__)

_POLL_S = 0.2


class StoreWriter(OpenStore):
    """The one writer of a store. Made by ``open_writer`` and ``create_store``.

    Attributes:
        root: The durable root, None before the first commit.
        committed: What the current generation is, None before the first commit.
        working: The slot that is being filled, None between a commit and ``begin``.
    """

    def __init__(
        self,
        *,
        path: Path,
        uuid: str,
        schema: str,
        records: Mapping[str, Record],
        documents: Mapping[str, bytes],
        drives: Sequence[Drive],
        places: Places,
        store_lock: StoreLock,
    ) -> None:
        super().__init__(path=path, schema=schema, records=records, drives=drives, writable=True)
        self.root: Root | None = None
        self.committed: Manifest | None = None
        self.working: int | None = None
        self._uuid = uuid
        self._table: Table | None = None
        self._places = places
        self._documents = documents
        self._metadata = {name: digest(data) for name, data in documents.items()}
        self._lock = store_lock
        self._slots: set[int] = set()
        self._recasting = False
        self._held: dict[int, Path] = {}
        self._written: dict[str, int] = {}
        self._written_guard = threading.Lock()
        self._failure: StorageError | None = None
        self._closed = False
        # Opened before anything is written: only then a sync reports every lost write to us.
        self._store_fd = (path, fsops.open_file(path, os.O_RDONLY | os.O_DIRECTORY))
        self._drive_fds = [(d.folder, fsops.open_file(d.label, os.O_RDONLY)) for d in drives]

    def start(self, slots: int) -> None:
        """Give a store that was just made its ``slots`` slots; slot 0 is the working one."""
        self.ensure_slots(slots)
        self.working = 0

    def resume(self, root: Root, listed: Sequence[OpenGeneration]) -> None:
        """Take up the store that ``root`` names, whose generations were found complete."""
        self.root = root
        self.committed, self._table = listed[-1].manifest, listed[-1].table
        for found in listed:
            self._files.attach(found.manifest.slot, found.records, found.locations)
            self._slots.add(found.manifest.slot)
        for slot in existing_slots(self.path):
            if slot not in self._slots:
                self._try_free_slot(slot)
        fsops.unlink(self.path / MARKER, missing_ok=True)
        self._reap()

    def _try_free_slot(self, slot: int) -> None:
        """Take in a slot that holds no truth; a damaged one is left for ``ensure_slots``."""
        try:
            read_metadata(self.path, slot, self._metadata)
            self._add_slot(slot)
        except CorruptionError as error:
            _log.warning("slot %d of %s is incomplete and unused: %s", slot, self.path, error)

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
        return self._chunk(name, index, self.manifest.slot, self.checksums(name))

    @property
    def slots(self) -> frozenset[int]:
        """The complete slots."""
        return frozenset(self._slots)

    # -- slots ---------------------------------------------------------------------------------

    def ensure_slots(self, count: int) -> None:
        """Create or repair slots until there are ``count`` complete ones; durable."""
        missing = [slot for slot in range(count) if slot not in self._slots]
        for slot in missing:
            if slot in self._protected():
                raise RefusedError(f"{self.path}: slot {slot} is damaged and still being read")
        self._make_slots(missing)

    def _make_slots(self, slots: Sequence[int]) -> None:
        """Create slots, or create them anew; durable."""
        if not slots:
            return
        for slot in slots:
            self._fill_in(slot)
        with self._fatal():
            self._sync([*self._drive_fds, self._store_fd])
            for slot in slots:
                finish_slot(self.path, slot, documents=self._documents)

    def _fill_in(self, slot: int) -> None:
        delete_slot(self.path, slot, drives=self.drives)
        create_slot(
            self.path,
            slot,
            records=list(self.records.values()),
            documents=self._documents,
            drives=self.drives,
            places=self._places,
        )
        self._add_slot(slot)

    def _add_slot(self, slot: int) -> None:
        locations = locate(
            self.path,
            slot,
            records=list(self.records.values()),
            drives=self.drives,
            lengths=plain_lengths(self.records),
        )
        self._files.attach(slot, self.records, locations)
        self._slots.add(slot)

    def recast(self, records: Sequence[Record], places: Places, *, wait_s: float = 3600.0) -> int:
        """Make a slot for ``records`` the working slot and return it; all in it is zero.

        They are those of the store, with other codecs or shards. From the next commit on every
        slot is cut like that; free slots of the old cut are removed, for the room.
        """
        slot = self._slot_to_recast(wait_s)
        self.records = {record.name: record for record in records}
        self._documents = metadata_documents(records)
        self._metadata = {name: digest(data) for name, data in self._documents.items()}
        self._places, self._recasting = places, True
        self.drop_free_slots()
        self._make_slots([slot])
        self.working, self._written = slot, {}
        return slot

    def _slot_to_recast(self, wait_s: float) -> int:
        self._require_usable()
        if self.working is not None:
            raise ValueError(f"slot {self.working} is being written; commit it first")
        if self._slots <= self._protected() and not self._held:
            return max(self._slots) + 1
        return self._await_free_slot(time.monotonic() + wait_s)

    def drop_free_slots(self) -> None:
        """Remove every slot that no generation and no reader needs."""
        for slot in set(existing_slots(self.path)) - self._protected() - {self.working}:
            self._files.detach(slot)
            self._slots.discard(slot)
            delete_slot(self.path, slot, drives=self.drives)

    def reserve(self) -> None:
        """Give every record that changes its blocks, in every slot; what is read stays the same.

        Raises:
            CapacityError: A drive is too small; the message is a table of need and free bytes.
        """
        slots = [self._files.locations(slot) for slot in sorted(self._slots)]
        space.reserve(list(self.records.values()), slots, self.drives)

    def begin(self, *, wait_s: float = 3600.0) -> int:
        """Make a free slot the working slot and return it; its content is arbitrary.

        Waits for the readers of dropped generations if they hold every free slot.

        Raises:
            RefusedError: There are too few slots.
            LockedError: Readers still held the slots after ``wait_s`` seconds.
        """
        self._require_usable()
        if self.working is not None:
            raise ValueError(f"slot {self.working} is being written; commit it first")
        self.working = self._await_free_slot(time.monotonic() + wait_s)
        self._written = {}
        return self.working

    def _await_free_slot(self, deadline: float) -> int:
        told = False
        while (slot := self._free_slot()) is None:
            self._require_spare_slot()
            readers = self._readers()
            if time.monotonic() >= deadline:
                raise LockedError(f"{self.path}: every free slot is being read by {readers}")
            if not told:
                _log.warning("%s: waiting for a slot that is read by %s", self.path, readers)
                told = True
            time.sleep(_POLL_S)
        return slot

    def _free_slot(self) -> int | None:
        if self._held and self._slots <= self._protected():
            self._reap()
        return min(self._slots - self._protected(), default=None)

    def _protected(self) -> set[int]:
        listed = {g.slot for g in self.root.generations} if self.root else set()
        return listed | set(self._held)

    def _require_spare_slot(self) -> None:
        if not self._held:
            raise RefusedError(
                f"{self.path}: {len(self._slots)} slots and "
                f"{len(self._protected())} retained generations leave none to write to; "
                "ensure_slots(retain + 1) first"
            )

    def _readers(self) -> str:
        pids = sorted({pid for path in self._held.values() for pid in lock.holders_of(path)})
        return f"pid {', '.join(map(str, pids))}" if pids else "an unknown process"

    def _reap(self) -> None:
        """Free the slots of dropped generations, except those that are being read."""
        listed = {g.number for g in self.root.generations} if self.root else set()
        self._held = reap(self.path, listed)

    # -- bytes ---------------------------------------------------------------------------------

    def read(self, slot: int, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes of a record in ``slot``; aligned buffers are not copied."""
        self._files.read(slot, name, offset, out)

    def write(self, slot: int, name: str, offset: int, data: memoryview) -> None:
        """Write into the working slot; durable and visible with the next commit.

        ``offset`` is a multiple of 4096, and the length too unless it reaches the record's end.
        Buffers that are multiples of 4096 are not copied. A failure ends the use of this writer:
        what the slot holds is unknown.
        """
        record = self.records[name]
        if slot != self.working:
            raise ValueError(f"slot {slot} is not the working slot ({self.working})")
        if record.shared and self.committed is not None and not self._recasting:
            raise ValueError(f"{name} is shared by all slots and never changes")
        with self._fatal():
            self._files.write(slot, name, offset, data)
        self._count_written(name, min(memoryview(data).nbytes, record.nbytes - offset))

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
        data = manifest.encode()
        generation = Generation(
            number=manifest.generation,
            parent=manifest.parent,
            slot=manifest.slot,
            step=step,
            digest=digest(data),
        )
        root = self._next_root(generation, retain)
        with self._fatal():
            # Bytes before names: a manifest must promise nothing that a power cut can undo.
            self._sync(self._drive_fds)
            publish(self.path, root, data, table)
            fsops.unlink(self.path / MARKER, missing_ok=True)
        self.root, self.committed, self.working = root, manifest, None
        self._recasting = False
        self._table = np.concatenate(tables).astype(np.uint32)
        with self._fatal():
            self._reap()
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
            metadata=self._metadata,
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

    def _next_root(self, generation: Generation, retain: int) -> Root:
        before = self.root.generations if self.root else ()
        return Root(
            uuid=self._uuid,
            drives={drive.number: drive.share for drive in self.drives},
            schema=self._schema,
            generations=(*before, generation)[-retain:],
        )

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
        for _, fd in (self._store_fd, *self._drive_fds):
            os.close(fd)
        self._lock.close()


def open_writer(path: str | os.PathLike[str], *, run_id: str = "") -> StoreWriter:
    """Open a store for writing; the generation that is visible is durable when this returns.

    Raises:
        LockedError: Another process writes the store.
        RefusedError: There is no store at ``path``.
        CorruptionError: A manifest, metadata, drive, link or shard is not what was committed.
    """
    store = Path(os.path.abspath(path))
    read_root(store)  # before the lock: nothing is created in a folder that is no store
    store_lock = StoreLock(store / "LOCK", run_id)
    try:
        return _open_locked(store, store_lock)
    except BaseException:
        store_lock.close()
        raise


def _open_locked(store: Path, store_lock: StoreLock) -> StoreWriter:
    # A visible name is not yet durable: a writer may have died between rename and fsync.
    fsops.fsync_file(store / ROOT)
    fsops.fsync_dir(store)
    root = read_root(store)
    drives = open_drives(store, root.uuid, root.drives)
    listed = [open_generation(store, root, g, drives) for g in root.generations]
    latest = listed[-1]
    writer = StoreWriter(
        path=store,
        uuid=root.uuid,
        schema=root.schema,
        records=latest.records,
        documents=latest.documents,
        drives=drives,
        places=places_of(latest.locations),
        store_lock=store_lock,
    )
    try:
        writer.resume(root, listed)
    except BaseException:
        writer.close()
        raise
    return writer
