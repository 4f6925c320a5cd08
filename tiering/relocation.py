"""Which shard files have to go to another drive, and in which order there is room for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiering import space
from tiering.drive import Drive, free_nbytes, nearest
from tiering.errors import CapacityError
from tiering.records import ALIGNMENT, Record, round_up
from tiering.shares import spread
from tiering.slots import Locations, Places, Shard, file_name, link_path, places_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFiles:
    """The shards of one complete slot; ``listed`` if it holds a generation that can be read."""

    number: int
    records: Mapping[str, Record]
    locations: Locations
    listed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One file that must come to lie on another drive; ``links`` name it, one a slot.

    ``sources`` are where the links lead to now: more than one place after a kill. ``nbytes`` is
    what has to be copied; bytes before ``start`` hold no truth, the first ``reserved`` have blocks.
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


@dataclass(slots=True, kw_only=True)
class _File:
    """A file by its name: the record and shard that it is, and the slots that link to it."""

    record: Record
    shard: int
    target: Drive
    slots: list[SlotFiles] = field(default_factory=list)


def plan_moves(store: Path, slots: Sequence[SlotFiles], targets: Sequence[Drive]) -> list[Move]:
    """Return what has to move so that each drive has its share; the last slot is the current one.

    Shards that are cut alike lie on the same drive in every slot.
    """
    by_number = {drive.number: drive for drive in targets}
    files: dict[str, _File] = {}
    for slot, places in zip(slots, _places(slots, targets), strict=True):
        for record in slot.records.values():
            for shard, number in enumerate(places[record.name]):
                name = file_name(slot.number, record, shard)
                file = _File(record=record, shard=shard, target=by_number[number])
                files.setdefault(name, file).slots.append(slot)
    moves = (_move(store, name, file) for name, file in files.items())
    return [move for move in moves if move.leaving]


def _places(slots: Sequence[SlotFiles], targets: Sequence[Drive]) -> list[Places]:
    shares = {drive.number: drive.share for drive in targets}
    found: dict[tuple[Record, ...], Places] = {}
    for slot in reversed(slots):
        records = tuple(slot.records.values())
        if records not in found:
            found[records] = spread(records, shares, places_of(slot.locations))
    return [found[tuple(slot.records.values())] for slot in slots]


def _move(store: Path, name: str, file: _File) -> Move:
    record, shard = file.record, file.shard
    sources = tuple(slot.locations[record.name][shard] for slot in file.slots)
    arrived = any(source.drive == file.target.number for source in sources)
    start = 0 if any(slot.listed for slot in file.slots) else _first_truth(record, shard)
    reserved = record.codec is None and space.is_reserved(record, shard, sources[0])
    status = sources[0].path.stat()
    whole = reserved or not start
    nbytes = 512 * status.st_blocks if whole else round_up(status.st_size - start, ALIGNMENT)
    return Move(
        name=name,
        links=tuple(link_path(store, slot.number, record.name, shard) for slot in file.slots),
        sources=sources,
        target=file.target,
        nbytes=0 if arrived else nbytes,
        start=start,
        reserved=space.valid_nbytes(record, shard) if reserved else 0,
    )


def _first_truth(record: Record, shard: int) -> int:
    """Return where a shard that nobody reads begins to matter: its index makes it a valid one."""
    if record.shared or record.codec is not None:
        return 0
    return record.geometry.chunks_in(shard) * record.geometry.chunk_nbytes


def in_order(moves: Sequence[Move], drives: Iterable[Drive]) -> list[Move]:
    """Return the moves in an order in which there is room for each.

    Raises:
        CapacityError: There is none; the message is a table of need and free bytes.
    """
    by_number = {drive.number: drive for drive in drives}
    room = _RoomLeft(by_number)
    waiting, ordered = list(moves), list[Move]()
    while waiting:
        took = [room.take(move) for move in waiting]
        if not any(took):
            raise CapacityError(_table(by_number.values(), moves, waiting[0]))
        ordered += [move for move, gone in zip(waiting, took, strict=True) if gone]
        waiting = [move for move, gone in zip(waiting, took, strict=True) if not gone]
    return ordered


class _RoomLeft:
    """The free bytes of each file system while files come and go."""

    def __init__(self, drives: Mapping[int, Drive]) -> None:
        folders = {number: nearest(drive.folder) for number, drive in drives.items()}
        self._device = {number: folder.stat().st_dev for number, folder in folders.items()}
        self._free = {self._device[n]: free_nbytes(folder) for n, folder in folders.items()}

    def take(self, move: Move) -> bool:
        """Whether there is room for a file; its old places are free afterwards."""
        target = self._device[move.target.number]
        if move.nbytes and move.nbytes + ALIGNMENT > self._free[target]:
            return False
        self._free[target] -= move.nbytes
        for drive, path in {(source.drive, source.path) for source in move.leaving}:
            self._free[self._device[drive]] += 512 * path.stat().st_blocks
        return True


def _table(drives: Iterable[Drive], moves: Sequence[Move], stuck: Move) -> str:
    def need(number: int) -> int:
        return sum(move.nbytes for move in moves if move.target.number == number)

    def rows() -> Iterator[str]:
        yield f"drive {stuck.target.number} full: the shards do not fit"
        yield f"{'drive':>5} {'need B':>16} {'free B':>16}  folder"
        for d in drives:
            free = free_nbytes(nearest(d.folder))
            yield f"{d.number:>5} {need(d.number):>16} {free:>16}  {d.folder}"

    return "\n".join(rows())
