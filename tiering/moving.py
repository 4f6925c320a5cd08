"""Moving a store to other drives, shard by shard; it is whole at every instant.

The links are the truth of place. A shard is copied under another name, made durable, given its
name, and only then the link is replaced; what it replaced goes last. A kill leaves at most files
that no link leads to, and drives that hold nothing: the next move removes both before it begins.
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
from tiering.drive import Drive
from tiering.drives import (
    NEW_LINK,
    create_drive,
    drop_drive,
    find_drives,
    open_drives,
    replace_link,
    unlisted_drives,
)
from tiering.errors import CorruptionError, LockedError
from tiering.generations import ROOT, going_back, read_root, reap, replace_root
from tiering.lock import StoreLock
from tiering.manifest import Generation, Root, plain_lengths
from tiering.opened import OpenGeneration, open_generation
from tiering.ownership import claim_drives
from tiering.relocation import Move, SlotFiles, in_order, plan_moves
from tiering.slots import (
    SHARED,
    Shard,
    delete_slot,
    existing_slots,
    link_target,
    locate,
    read_metadata,
)

_log = logging.getLogger(__name__)

_SHARD_FILE = re.compile(
    rf"(\d+|{SHARED}[^.]*)\.(?P<record>.+)\.\d+({re.escape(fsops.UNFINISHED)})?"
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a move did: the drives that the store has now, files and bytes that went elsewhere."""

    drives: tuple[Drive, ...]
    files: int
    nbytes: int
    dropped: tuple[Path, ...]


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
        RefusedError: A folder cannot be a drive, or the store is a copy that shares its drives.
        CapacityError: The drives have too little room; nothing was changed.
        CorruptionError: The store is not what was committed; nothing was changed.
        StorageError: Copying failed; the store is whole.
    """
    store = Path(os.path.abspath(path))
    read_root(store)  # before the lock: nothing is created in a folder that is no store
    with StoreLock(store / "LOCK") as store_lock, _opened(store, store_lock) as mover:
        mover.clear_remains()
        return mover.run(folders, measure, on_progress or (lambda _done, _total: None))


@contextmanager
def _opened(store: Path, store_lock: StoreLock) -> Iterator[_Mover]:
    """Lend the store after the checks of any opening; readers are kept out meanwhile."""
    fsops.fsync_file(store / ROOT)  # a visible name is not yet durable
    fsops.fsync_dir(store)
    root = read_root(store)
    drives = open_drives(store, root.uuid, root.drives)
    claim_drives(store, root.uuid, drives)
    for drive in drives:
        store_lock.own(drive.label)
    listed = [_whole(store, root, generation, drives) for generation in root.generations]
    with _claimed(store, root):
        slots = [_slot_of(generation) for generation in listed]
        taken = {slot.number for slot in slots}
        rest = [number for number in existing_slots(store) if number not in taken]
        found = [_free_slot(store, number, listed[-1], drives) for number in rest]
        yield _Mover(store, root, drives, [*filter(None, found), *slots])


def _whole(
    store: Path, root: Root, generation: Generation, drives: Sequence[Drive]
) -> OpenGeneration:
    with going_back(root, generation):
        return open_generation(store, root, generation, drives)


@contextmanager
def _claimed(store: Path, root: Root) -> Iterator[None]:
    """Own every manifest alone, so that nobody reads a generation.

    Raises:
        LockedError: Somebody does; the message names the processes.
    """
    held = reap(store, {g.number for g in root.generations})
    _refuse_readers(store, held)
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
        names = lock.named_pids(pids)
        raise LockedError(f"{store} is being read by {names}; move it when they have ended")


def _slot_of(found: OpenGeneration) -> SlotFiles:
    return SlotFiles(
        number=found.manifest.slot,
        records=found.records,
        locations=found.locations,
        listed=True,
    )


def _free_slot(
    store: Path, number: int, latest: OpenGeneration, drives: Sequence[Drive]
) -> SlotFiles | None:
    """Return a slot that is cut like the latest; None if it is not, or damaged."""
    records = latest.records
    try:
        read_metadata(store, number, latest.manifest.metadata)
        lengths = plain_lengths(records)
        found = locate(
            store, number, records=list(records.values()), drives=drives, lengths=lengths
        )
    except CorruptionError:
        return None
    return SlotFiles(number=number, records=records, locations=found, listed=False)


class _Mover:
    """A store that nobody else has open: its drives, and its complete slots, the current last."""

    def __init__(
        self, store: Path, root: Root, drives: Sequence[Drive], slots: Sequence[SlotFiles]
    ) -> None:
        self._store = store
        self._root = root
        self._drives = tuple(drives)
        self._slots = slots

    def clear_remains(self) -> None:
        """Remove what no link leads to and no root lists: what a kill left of a move before."""
        for slot in set(existing_slots(self._store)) - {slot.number for slot in self._slots}:
            _log.warning("slot %d of %s is incomplete and unused: removed", slot, self._store)
            delete_slot(self._store, slot, drives=self._drives)
        for drive in unlisted_drives(self._store, self._root.drives):
            drop_drive(self._store, self._root.uuid, drive)
        fsops.unlink(self._store / NEW_LINK, missing_ok=True)
        linked = self._paths()
        names = {name for slot in self._slots for name in slot.records}
        for path in (path for drive in self._drives for path in sorted(drive.folder.iterdir())):
            match = _SHARD_FILE.fullmatch(path.name)
            if match and match["record"] in names and path not in linked:
                fsops.unlink(path)

    def _paths(self) -> set[Path]:
        """Return every file that a link of a slot leads to."""
        tables = [shards for slot in self._slots for shards in slot.locations.values()]
        return {shard.path for shards in tables for shard in shards}

    def run(self, folders: Sequence[Path], measure: Measure, on_progress: Progress) -> Moved:
        """Do everything; raises before anything is changed if it cannot be done."""
        found = tuple(find_drives(self._store, self._root.uuid, folders, self._drives))
        targets = self._with_shares(found, measure)
        moves = plan_moves(self._store, self._slots, targets)
        moves = in_order(moves, (*self._drives, *targets))
        self._take_in(targets)
        self._carry_out(moves, on_progress)
        dropped = self._drop_others(targets)
        nbytes = sum(move.nbytes for move in moves)
        return Moved(drives=self._drives, files=len(moves), nbytes=nbytes, dropped=dropped)

    def _with_shares(self, found: Sequence[Drive], measure: Measure) -> tuple[Drive, ...]:
        """Return the drives with new shares; those of a move that was interrupted stay."""
        leaving = self._root.drives.keys() - {drive.number for drive in found}
        begun = leaving and not any(self._root.drives[number] for number in leaving)
        if begun and all(drive.number in self._root.drives for drive in found):
            return tuple(found)
        records = list(self._slots[-1].records.values())
        nbytes = space.slots_nbytes(records, max(2, len(self._slots)))
        return with_shares(found, nbytes, measure=measure, held=self._held())

    def _held(self) -> Mapping[int, int]:
        """Return the bytes of the store on each file system."""
        held: dict[int, int] = {}
        for path in self._paths():
            status = path.stat()
            held[status.st_dev] = held.get(status.st_dev, 0) + 512 * status.st_blocks
        return held

    def _take_in(self, targets: Sequence[Drive]) -> None:
        """Create the drives that are new, and make the root list them with the new shares."""
        present = {drive.number for drive in self._drives}
        new = [drive for drive in targets if drive.number not in present]
        for drive in new:
            create_drive(self._store, self._root.uuid, drive)
        merged = {drive.number: replace(drive, share=0.0) for drive in self._drives}
        merged |= {drive.number: drive for drive in targets}
        self._list_drives([merged[number] for number in sorted(merged)])

    def _list_drives(self, drives: Sequence[Drive]) -> None:
        root = replace(self._root, drives={drive.number: drive.share for drive in drives})
        if root != self._root:
            replace_root(self._store, root)
        self._root, self._drives = root, tuple(drives)

    def _carry_out(self, moves: Sequence[Move], on_progress: Progress) -> None:
        meter = _Meter(moves, on_progress)
        largest = max((move.sources[0].path.stat().st_size for move in moves), default=0)
        with _copier(self._drives, largest) as copier:
            for move in moves:
                self._carry(move, copier, meter.add)
                meter.end(move)

    def _carry(self, move: Move, copier: Copier, on_bytes: Callable[[int], None]) -> None:
        """Make the links of one file lead to its new place, then remove it from the old."""
        if not move.arrived:
            self._copy(move, copier, on_bytes)
        for link in move.links:
            # Durable before the old file goes: the link must never lead nowhere.
            replace_link(self._store, link, link_target(move.target.number, move.name))
        for path in sorted({source.path for source in move.leaving}):
            fsops.unlink(path)

    def _copy(self, move: Move, copier: Copier, on_bytes: Callable[[int], None]) -> None:
        final = move.target.folder / move.name
        temporary = final.with_name(move.name + fsops.UNFINISHED)
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
        for drive in leaving:
            # Empty before it is forgotten, or a power cut may leave files that nobody looks for.
            fsops.fsync_dir(drive.folder)
        # The root first: a drive that it lists must be there.
        self._list_drives([drive for drive in self._drives if drive.number in kept])
        for drive in leaving:
            drop_drive(self._store, self._root.uuid, drive)
        return tuple(drive.folder for drive in leaving)


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

    def __init__(self, moves: Sequence[Move], report: Progress) -> None:
        self._total = sum(move.nbytes for move in moves)
        self._report = report
        self._ended = 0
        self._copied = 0

    def add(self, nbytes: int) -> None:
        """Count bytes of the file that is being copied."""
        self._copied += nbytes
        self._report(min(self._ended + self._copied, self._total), self._total)

    def end(self, move: Move) -> None:
        """Count the file as done."""
        self._ended += move.nbytes
        self._copied = 0
        self._report(self._ended, self._total)
