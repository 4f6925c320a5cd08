"""Moving a store to other drives, shard by shard; it is whole at every instant.

The links are the truth of place. A shard is copied under another name, made durable, given its
name, and only then the link is replaced; what it replaced goes last. A kill leaves at most files
that no link names, and drives that hold nothing: the next move removes both before it begins.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tiering import bandwidth, fsops, lock, space
from tiering.arena import Arena
from tiering.backends.posix import PosixBackend
from tiering.backends.probe import probe
from tiering.bandwidth import Measure, with_shares
from tiering.copying import Copier
from tiering.drives import (
    NEW_LINK,
    Drive,
    create_drive,
    drop_drive,
    find_drives,
    open_drives,
    replace_link,
    unlisted_drives,
)
from tiering.errors import CapacityError, CorruptionError, LockedError
from tiering.generations import ROOT, read_manifest, read_root, reap, replace_root
from tiering.lock import StoreLock
from tiering.manifest import Root
from tiering.opened import records_of
from tiering.records import ALIGNMENT, Record
from tiering.shares import spread
from tiering.slots import (
    Locations,
    Places,
    Shard,
    delete_slot,
    existing_slots,
    file_name,
    link_path,
    link_target,
    locate,
    places_of,
    read_metadata,
)
from tiering.writer import check_generation

_log = logging.getLogger(__name__)

_SHARD_FILE = re.compile(r"(\d+|shared)\.[A-Za-z0-9_].*\.\d+(\.moving)?")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a move did: the drives that the store has now, files and bytes that went elsewhere."""

    drives: tuple[Drive, ...]
    files: int
    nbytes: int
    dropped: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """One file that must come to lie on another drive; ``links`` name it, one a slot.

    ``sources`` are where the links lead to now: more than one place after a kill. ``nbytes`` is
    what has to be copied; bytes before ``start`` hold no truth.
    """

    name: str
    links: tuple[Path, ...]
    sources: tuple[Shard, ...]
    target: Drive
    nbytes: int
    start: int
    reserved: int

    @property
    def arrived(self) -> bool:
        """Whether a link leads to the target already, so that nothing has to be copied."""
        return any(source.drive == self.target.number for source in self.sources)

    @property
    def leaving(self) -> tuple[Shard, ...]:
        """The files that no link names any more afterwards."""
        return tuple(s for s in self.sources if s.drive != self.target.number)


def move_store(
    path: str | os.PathLike[str],
    folders: Sequence[Path],
    *,
    measure: Measure = bandwidth.measure,
    on_progress: Progress | None = None,
) -> Moved:
    """Make the shards of a store lie on the drives in ``folders``, and on no others.

    Drives that the store has already keep what their new share allows. Nobody can open the store
    meanwhile. After an interruption the store is whole, and the same call goes on.

    Raises:
        LockedError: A process writes the store or reads one of its generations.
        RefusedError: A folder cannot be a drive.
        CapacityError: The drives have too little room; nothing was changed.
        CorruptionError: The store is not what was committed; nothing was changed.
        StorageError: Copying failed; the store is whole.
    """
    store = Path(os.path.abspath(path))
    read_root(store)  # before the lock: nothing is created in a folder that is no store
    with StoreLock(store / "LOCK"), _Mover.opened(store) as mover:
        mover.clear_remains()
        return mover.run(folders, measure, on_progress or (lambda _done, _total: None))


class _Mover:
    """A store that nobody else has open: its drives, and the shards of every complete slot."""

    def __init__(
        self,
        store: Path,
        root: Root,
        records: Mapping[str, Record],
        drives: Sequence[Drive],
        slots: Mapping[int, Locations],
    ) -> None:
        self._store = store
        self._root = root
        self._records = records
        self._drives = tuple(drives)
        self._slots = dict(slots)

    # -- opening -------------------------------------------------------------------------------

    @classmethod
    @contextmanager
    def opened(cls, store: Path) -> Iterator[_Mover]:
        """Lend the store after the checks of any opening; new readers are kept out meanwhile."""
        fsops.fsync_file(store / ROOT)  # a visible name is not yet durable
        fsops.fsync_dir(store)
        root = read_root(store)
        drives = open_drives(store, root.uuid, root.drives)
        manifest, _ = read_manifest(store, root, root.latest)
        documents = read_metadata(store, root.latest.slot, manifest.metadata)
        records = records_of(manifest, documents)
        slots = {
            g.slot: check_generation(store, root, g, records, drives) for g in root.generations
        }
        with _claimed(store, root):
            for slot in set(existing_slots(store)) - set(slots):
                free = _free_slot(store, slot, manifest.metadata, records, drives)
                if free is not None:
                    slots[slot] = free
            yield cls(store, root, records, drives, slots)

    def clear_remains(self) -> None:
        """Remove what no link names and no root lists: what a kill left of a move before."""
        for slot in set(existing_slots(self._store)) - set(self._slots):
            _log.warning("slot %d of %s is incomplete and unused: removed", slot, self._store)
            delete_slot(self._store, slot, drives=self._drives)
        for drive in unlisted_drives(self._store, self._root.drives):
            drop_drive(self._store, self._root.uuid, drive)
        fsops.unlink(self._store / NEW_LINK, missing_ok=True)
        linked = self._paths()
        for drive in self._drives:
            for path in sorted(drive.folder.iterdir()):
                if _SHARD_FILE.fullmatch(path.name) and path not in linked:
                    fsops.unlink(path)

    def _paths(self) -> set[Path]:
        """Return every file that a link of a slot leads to."""
        tables = [shards for slot in self._slots.values() for shards in slot.values()]
        return {shard.path for shards in tables for shard in shards}

    # -- the move ------------------------------------------------------------------------------

    def run(self, folders: Sequence[Path], measure: Measure, on_progress: Progress) -> Moved:
        """Do everything; raises before anything is changed if it cannot be done."""
        found = tuple(find_drives(self._store, self._root.uuid, folders, self._drives))
        targets = self._with_shares(found, measure)
        moves = self._ordered(self._moves(targets), targets)
        self._take_in(targets)
        self._carry_out(moves, on_progress)
        dropped = self._drop_others(targets)
        return Moved(
            drives=self._drives,
            files=len(moves),
            nbytes=sum(move.nbytes for move in moves),
            dropped=dropped,
        )

    def _with_shares(self, found: Sequence[Drive], measure: Measure) -> tuple[Drive, ...]:
        """Return the drives with new shares; those of a move that was interrupted stay."""
        leaving = self._root.drives.keys() - {drive.number for drive in found}
        begun = leaving and not any(self._root.drives[number] for number in leaving)
        if begun and all(drive.number in self._root.drives for drive in found):
            return tuple(found)
        slots = max(2, len(self._slots))
        nbytes = space.slots_nbytes(list(self._records.values()), slots)
        return with_shares(found, nbytes, measure=measure, held=self._held())

    def _held(self) -> Mapping[int, int]:
        """Return the bytes of the store on each file system."""
        held: dict[int, int] = {}
        for path in self._paths():
            status = path.stat()
            held[status.st_dev] = held.get(status.st_dev, 0) + 512 * status.st_blocks
        return held

    def _moves(self, targets: Sequence[Drive]) -> Iterator[_Move]:
        places = self._places(targets)
        by_number = {drive.number: drive for drive in targets}
        for record in self._records.values():
            for shard, number in enumerate(places[record.name]):
                for slots in [sorted(self._slots)] if record.shared else [[s] for s in self._slots]:
                    move = self._move(record, shard, slots, by_number[number])
                    if move.leaving:
                        yield move

    def _places(self, targets: Sequence[Drive]) -> Places:
        current = places_of(self._slots[self._root.latest.slot])
        shares = {drive.number: drive.share for drive in targets}
        return spread(list(self._records.values()), shares, current)

    def _move(self, record: Record, shard: int, slots: Sequence[int], target: Drive) -> _Move:
        sources = tuple(self._slots[slot][record.name][shard] for slot in slots)
        listed = {g.slot for g in self._root.generations}
        is_free = not record.shared and not listed & set(slots)
        status = sources[0].path.stat()
        reserved = space.is_reserved(record, shard, sources[0])
        valid = space.valid_nbytes(record, shard)
        # Nobody reads the chunks of a free slot; its index makes it the valid shard that it was.
        start = record.geometry.chunks_in(shard) * record.geometry.chunk_nbytes if is_free else 0
        nbytes = status.st_size - start if is_free and not reserved else 512 * status.st_blocks
        move = _Move(
            name=file_name(slots[0], record, shard),
            links=tuple(link_path(self._store, slot, record.name, shard) for slot in slots),
            sources=sources,
            target=target,
            nbytes=nbytes,
            start=start,
            reserved=valid if reserved else 0,
        )
        return replace(move, nbytes=0) if move.arrived else move

    def _ordered(self, moves: Iterator[_Move], targets: Sequence[Drive]) -> list[_Move]:
        """Return the moves in an order in which there is room for each.

        Raises:
            CapacityError: There is none.
        """
        waiting = list(moves)
        room = _RoomLeft({d.number: d for d in (*self._drives, *targets)})
        ordered: list[_Move] = []
        while waiting:
            stuck = [move for move in waiting if not room.take(move)]
            if len(stuck) == len(waiting):
                raise CapacityError(_table(targets, [*ordered, *waiting], stuck[0]))
            left = set(map(id, stuck))
            ordered += [move for move in waiting if id(move) not in left]
            waiting = stuck
        return ordered

    def _take_in(self, targets: Sequence[Drive]) -> None:
        """Create the drives that are new, and make the root list them with the new shares."""
        present = {drive.number for drive in self._drives}
        new = [drive for drive in targets if drive.number not in present]
        for drive in new:
            create_drive(self._store, self._root.uuid, drive)
        if new:
            fsops.fsync_dir(self._store / "drives")
        shares = dict.fromkeys(self._root.drives, 0.0)
        self._list_drives(shares | {drive.number: drive.share for drive in targets})
        others = {drive.number: replace(drive, share=0.0) for drive in self._drives}
        merged = others | {drive.number: drive for drive in targets}
        self._drives = tuple(merged[number] for number in sorted(merged))

    def _list_drives(self, shares: Mapping[int, float]) -> None:
        root = replace(self._root, drives=dict(sorted(shares.items())))
        if root != self._root:
            replace_root(self._store, root)
            self._root = root

    def _carry_out(self, moves: Sequence[_Move], on_progress: Progress) -> None:
        meter = _Meter(moves, on_progress)
        largest = max((path.stat().st_size for path in self._paths()), default=0)
        with _copier(self._drives, largest) as copier:
            for move in moves:
                self._carry(move, copier, meter.add)
                meter.end(move)

    def _carry(self, move: _Move, copier: Copier, on_bytes: Callable[[int], None]) -> None:
        """Make the links of one file lead to its new place, then remove it from the old."""
        if not move.arrived:
            self._copy(move, copier, on_bytes)
        for link in move.links:
            # Durable before the old file goes: the link must never lead nowhere.
            replace_link(self._store, link, link_target(move.target.number, move.name))
        for path in sorted({source.path for source in move.leaving}):
            fsops.unlink(path)

    def _copy(self, move: _Move, copier: Copier, on_bytes: Callable[[int], None]) -> None:
        final = move.target.folder / move.name
        temporary = final.with_name(f"{move.name}.moving")
        try:
            copier.copy(
                move.sources[0],
                Shard(drive=move.target.number, path=temporary),
                start=move.start,
                reserved=move.reserved,
                on_bytes=on_bytes,
            )
        except BaseException:
            fsops.unlink(temporary, missing_ok=True)
            raise
        fsops.replace(temporary, final)
        fsops.fsync_dir(final.parent)  # name before link: the link must never lead nowhere

    def _drop_others(self, targets: Sequence[Drive]) -> tuple[Path, ...]:
        """Take the drives that hold nothing any more out of the root, then remove them."""
        kept = {drive.number for drive in targets}
        leaving = [drive for drive in self._drives if drive.number not in kept]
        # The root first: a drive that it lists must be there.
        self._list_drives({n: share for n, share in self._root.drives.items() if n in kept})
        for drive in leaving:
            drop_drive(self._store, self._root.uuid, drive)
        self._drives = tuple(drive for drive in self._drives if drive.number in kept)
        return tuple(drive.folder for drive in leaving)


@contextmanager
def _claimed(store: Path, root: Root) -> Iterator[None]:
    """Own every manifest alone, so that nobody reads a generation.

    Raises:
        LockedError: Somebody does; the message names the processes.
    """
    held = reap(store, {g.number for g in root.generations})
    _refuse_readers(store, held.values())
    with ExitStack() as stack:
        for generation in root.generations:
            path = store / generation.folder / "manifest.json"
            fd = lock.claim(path)
            if fd is None:
                _refuse_readers(store, [path])
            else:
                stack.callback(os.close, fd)
        yield


def _refuse_readers(store: Path, manifests: Collection[Path]) -> None:
    if manifests:
        pids = sorted({pid for path in manifests for pid in lock.holders_of(path)})
        names = ", ".join(map(str, pids)) or "unknown"
        raise LockedError(f"{store} is being read by pid {names}; move it when they have ended")


def _free_slot(
    store: Path,
    slot: int,
    metadata: Mapping[str, str],
    records: Mapping[str, Record],
    drives: Sequence[Drive],
) -> Locations | None:
    """Return where the shards of a slot lie that no generation names; None if it is damaged."""
    try:
        read_metadata(store, slot, metadata)
        return locate(store, slot, records=list(records.values()), drives=drives)
    except CorruptionError:
        return None


@contextmanager
def _copier(drives: Sequence[Drive], largest: int) -> Iterator[Copier]:
    with ExitStack() as stack:
        backends = {}
        for drive in drives:
            direct = probe(drive.folder).direct
            backend = PosixBackend(str(drive.number), direct=direct, writable=True)
            stack.callback(backend.close)
            backends[drive.number] = backend
        nbytes = Copier.memory_nbytes(largest)
        arena = stack.enter_context(Arena(nbytes, lock=False))
        yield stack.enter_context(Copier(backends, arena.take("copies", nbytes)))


class _Meter:
    """Reports the bytes that were copied; a file counts as done when its links are."""

    def __init__(self, moves: Sequence[_Move], report: Progress) -> None:
        self._total = sum(move.nbytes for move in moves)
        self._report = report
        self._ended = 0
        self._copied = 0

    def add(self, nbytes: int) -> None:
        """Count bytes of the file that is being copied."""
        self._copied += nbytes
        self._report(min(self._ended + self._copied, self._total), self._total)

    def end(self, move: _Move) -> None:
        """Count the file as done."""
        self._ended += move.nbytes
        self._copied = 0
        self._report(self._ended, self._total)


class _RoomLeft:
    """The free bytes of each file system while files come and go."""

    def __init__(self, drives: Mapping[int, Drive]) -> None:
        folders = {n: _nearest(drive.folder) for n, drive in drives.items()}
        self._device = {n: folder.stat().st_dev for n, folder in folders.items()}
        self._free = {self._device[n]: _free_nbytes(folder) for n, folder in folders.items()}

    def take(self, move: _Move) -> bool:
        """Whether there is room for a file; its old places are free afterwards."""
        target = self._device[move.target.number]
        if move.nbytes and move.nbytes + ALIGNMENT > self._free[target]:
            return False
        self._free[target] -= move.nbytes
        for drive, path in {(source.drive, source.path) for source in move.leaving}:
            self._free[self._device[drive]] += 512 * path.stat().st_blocks
        return True


def _nearest(folder: Path) -> Path:
    return folder if folder.is_dir() else folder.parent


def _free_nbytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _table(targets: Sequence[Drive], moves: Sequence[_Move], stuck: _Move) -> str:
    needs = {d.number: sum(m.nbytes for m in moves if m.target.number == d.number) for d in targets}
    rows = [
        f"drive {stuck.target.number} full: no room for {stuck.name} of {stuck.nbytes} B",
        f"{'drive':>5} {'need B':>16} {'free B':>16}  folder",
    ]
    for drive in targets:
        free = _free_nbytes(_nearest(drive.folder))
        rows.append(f"{drive.number:>5} {needs[drive.number]:>16} {free:>16}  {drive.folder}")
    return "\n".join(rows)
