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

from tiering import fsops, lock
from tiering.checksum import Table, zeros_table
from tiering.drives import Drive, is_copy_on_write, open_drives
from tiering.errors import CapacityError, CorruptionError, LockedError, RefusedError, StorageError
from tiering.lock import StoreLock
from tiering.manifest import (
    Generation,
    Manifest,
    Root,
    digest,
    encode_table,
    entries,
)
from tiering.opened import (
    MARKER,
    ROOT,
    ChunkRef,
    OpenStore,
    checksums_of,
    load_records,
    read_manifest,
    read_root,
)
from tiering.records import Record
from tiering.slots import (
    Locations,
    Places,
    create_slot,
    delete_slot,
    existing_slots,
    locate,
    metadata_digests,
    places_of,
    read_metadata,
    reservations,
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
        self._metadata: Mapping[str, str] = metadata_digests(list(records.values()))
        self._lock = store_lock
        self._slots: set[int] = set()
        self._held: dict[int, Path] = {}
        self._written: dict[str, int] = {}
        self._written_guard = threading.Lock()
        self._failure: StorageError | None = None
        self._store_fd = fsops.open_file(path, os.O_RDONLY | os.O_DIRECTORY)
        self._drive_fds = [fsops.open_file(drive.label, os.O_RDONLY) for drive in drives]

    def start(self, slots: int) -> None:
        """Take the first ``slots`` slots of a store that was just made; slot 0 is working."""
        for slot in range(slots):
            self._add_slot(slot)
        self.working = 0

    def resume(
        self, root: Root, manifest: Manifest, table: Table, locations: Mapping[int, Locations]
    ) -> None:
        """Take up the store that ``root`` names, whose listed slots were found complete."""
        self.root, self.committed, self._table = root, manifest, table
        for slot, shards in locations.items():
            self._files.attach(slot, shards)
            self._slots.add(slot)
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
        return self._chunks(name, self.manifest.slot, self.checksums(name))

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
            delete_slot(self.path, slot, drives=self.drives)
            create_slot(
                self.path,
                slot,
                records=list(self.records.values()),
                drives=self.drives,
                places=self._places,
            )
            self._add_slot(slot)
        if missing:
            with self._fatal():
                self._sync_drives()
                self._sync_store()

    def _add_slot(self, slot: int) -> Locations:
        records = list(self.records.values())
        locations = locate(self.path, slot, records=records, drives=self.drives)
        self._files.attach(slot, locations)
        self._slots.add(slot)
        return locations

    def reserve(self) -> None:
        """Give every record that changes its blocks, in every slot; what is read stays the same.

        Raises:
            CapacityError: A drive is too small; the message is a table of need and free bytes.
        """
        records = list(self.records.values())
        needs = [
            need
            for slot in sorted(self._slots)
            for need in reservations(records, self._files.locations(slot))
        ]
        missing = dict.fromkeys(range(len(self.drives)), 0)
        for need in needs:
            missing[need.drive] += need.missing
        self._require_space(missing)
        for drive in filter(is_copy_on_write, self.drives):
            _log.warning(
                "%s is copy-on-write: reserved blocks do not keep a later write from running "
                "out of space",
                drive.folder,
            )
        for need in needs:
            self._reserve_shard(need.path, need.nbytes, missing)

    def _reserve_shard(self, path: Path, nbytes: int, missing: Mapping[int, int]) -> None:
        try:
            fsops.reserve(path, nbytes)
        except StorageError as error:
            raise CapacityError(f"{error}\n{self._space_table(missing)}") from error

    def _require_space(self, missing: Mapping[int, int]) -> None:
        wanted: dict[int, int] = {}
        for drive in self.drives:
            device = drive.folder.stat().st_dev
            wanted[device] = wanted.get(device, 0) + missing[drive.number]
        for drive in self.drives:
            if wanted[drive.folder.stat().st_dev] > drive.free_nbytes():
                raise CapacityError(
                    f"drive {drive.number} full: the slots of {self.path} do not fit\n"
                    + self._space_table(missing)
                )

    def _space_table(self, missing: Mapping[int, int]) -> str:
        rows = [f"{'drive':>5} {'need B':>16} {'free B':>16}  folder"]
        rows += [
            f"{d.number:>5} {missing[d.number]:>16} {d.free_nbytes():>16}  {d.folder}"
            for d in self.drives
        ]
        return "\n".join(rows)

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
            self._reap()
        return slot

    def _free_slot(self) -> int | None:
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
        """Remove the manifests that the durable root does not list, unless they are being read.

        Only then is their slot free. One without a manifest file was never finished.
        """
        listed = {g.number for g in self.root.generations} if self.root else set()
        self._held = {}
        for folder in sorted((self.path / "manifests").iterdir()):
            if folder.name.isdecimal() and int(folder.name) not in listed:
                self._reap_manifest(folder)

    def _reap_manifest(self, folder: Path) -> None:
        path = folder / "manifest.json"
        if not path.exists():
            fsops.remove_tree(folder)
            return
        fd = lock.claim(path)
        if fd is None:
            self._held[Manifest.decode(path.read_bytes(), path).slot] = path
            return
        try:
            fsops.unlink(path)
            fsops.remove_tree(folder)
        finally:
            os.close(fd)

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
        if record.shared and self.committed is not None:
            raise ValueError(f"{name} is shared by all slots and never changes")
        with self._fatal():
            self._files.write(slot, name, offset, data)
        valid = max(0, min(memoryview(data).nbytes, record.nbytes - offset))
        with self._written_guard:
            self._written[name] = self._written.get(name, 0) + valid

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
            self._publish(root, data, table)
        self.root, self.committed, self.working = root, manifest, None
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
            records=entries(list(self.records.values())),
            metadata=self._metadata,
            table_digest=table_digest,
            train_state=train_state,
        )

    def _next_root(self, generation: Generation, retain: int) -> Root:
        before = self.root.generations if self.root else ()
        return Root(
            uuid=self._uuid,
            drives=len(self.drives),
            schema=self._schema,
            generations=(*before, generation)[-retain:],
        )

    def _publish(self, root: Root, manifest: bytes, table: bytes) -> None:
        self._sync_drives()  # bytes before names: a manifest never promises what a cut can undo
        if self.root is None:
            self._sync_store()
        folder = self.path / root.latest.folder
        fsops.make_dir(folder)
        fsops.write_file(folder / "checksums.bin", table)
        fsops.write_file(folder / "manifest.json", manifest)
        fsops.fsync_dir(folder)
        fsops.fsync_dir(folder.parent)
        temporary = self.path / f"{ROOT}.new"
        fsops.unlink(temporary, missing_ok=True)
        fsops.write_file(temporary, root.encode())
        fsops.replace(temporary, self.path / ROOT)
        fsops.fsync_dir(self.path)  # only now may the slot of a dropped generation be reused
        fsops.unlink(self.path / MARKER, missing_ok=True)

    def _sync_drives(self) -> None:
        seen = set()
        for drive, fd in zip(self.drives, self._drive_fds, strict=True):
            device = os.fstat(fd).st_dev
            if device not in seen:
                fsops.sync_drive(fd, drive.folder)
            seen.add(device)

    def _sync_store(self) -> None:
        fsops.sync_drive(self._store_fd, self.path)

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
        super().close()
        for fd in (self._store_fd, *self._drive_fds):
            if fd >= 0:
                os.close(fd)
        self._store_fd, self._drive_fds = -1, []
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
    manifest, table = read_manifest(store, root, root.latest)
    records = load_records(store, root.latest.slot, manifest)
    locations = {
        g.slot: _check_generation(store, root, g, records, drives) for g in root.generations
    }
    writer = StoreWriter(
        path=store,
        uuid=root.uuid,
        schema=root.schema,
        records=records,
        drives=drives,
        places=places_of(locations[root.latest.slot]),
        store_lock=store_lock,
    )
    writer.resume(root, manifest, table, locations)
    return writer


def _check_generation(
    store: Path,
    root: Root,
    generation: Generation,
    records: Mapping[str, Record],
    drives: Sequence[Drive],
) -> Locations:
    manifest, _ = read_manifest(store, root, generation)
    read_metadata(store, generation.slot, manifest.metadata)
    return locate(store, generation.slot, records=list(records.values()), drives=drives)
