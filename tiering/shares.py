"""How much of a store each drive takes, and which shard goes where. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiering.records import ALIGNMENT, Record, round_up
from tiering.slots import Places

_DIGITS = 4
_SLACK = 0.05  # of the smallest drive's bytes: what order may cost in balance, all drives together


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a drive could take: its rate, and the bytes free on its file system ``device``."""

    bytes_per_s: float
    free_nbytes: int
    device: int


def capped(rooms: Mapping[int, Room], nbytes: int) -> dict[int, float]:
    """Return shares that are in proportion to rates, but fit the free bytes for ``nbytes``.

    What a full drive cannot take goes to the others. Drives of one file system share its bytes.
    If even all of them have too little, the shares are in proportion to what is free.
    """
    weights = {number: max(room.bytes_per_s, 1.0) for number, room in rooms.items()}
    free = {room.device: max(0, room.free_nbytes) for room in rooms.values()}
    if sum(free.values()) <= nbytes:
        return _by_free(rooms, weights, free)
    shares: dict[int, float] = {}
    while len(shares) < len(rooms):
        left = 1 - sum(shares.values())
        total = sum(w for n, w in weights.items() if n not in shares)
        tried = {n: left * w / total for n, w in weights.items() if n not in shares}
        full = [d for d in free if _on(d, tried, rooms) * nbytes > free[d]]
        for number, share in tried.items():
            device = rooms[number].device
            if not full:
                shares[number] = share
            elif device in full:
                shares[number] = share / _on(device, tried, rooms) * free[device] / nbytes
    return _rounded(shares)


def _on(device: int, shares: Mapping[int, float], rooms: Mapping[int, Room]) -> float:
    return sum(share for number, share in shares.items() if rooms[number].device == device)


def _by_free(
    rooms: Mapping[int, Room], weights: Mapping[int, float], free: Mapping[int, int]
) -> dict[int, float]:
    total = sum(free.values())
    if not total:
        return _rounded({number: 1 / len(rooms) for number in rooms})
    return _rounded(
        {
            number: weights[number] / _on(room.device, weights, rooms) * free[room.device] / total
            for number, room in rooms.items()
        }
    )


def _rounded(shares: Mapping[int, float]) -> dict[int, float]:
    return {number: round(shares[number], _DIGITS) for number in sorted(shares)}


# -- spreading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One shard: the place of its record in the list, and its place among all shards."""

    order: int
    record: str
    shard: int
    nbytes: int


def spread(
    records: Sequence[Record], shares: Mapping[int, float], current: Places | None = None
) -> Places:
    """Return a drive for every shard, so that each drive has its share of the bytes.

    Equal arguments give equal places. Shards that follow each other are kept apart as far as
    the balance allows. A shard stays where ``current`` has it unless its drive has too much.
    """
    pieces = _pieces(records)
    filling = _Filling.of(shares, sum(piece.nbytes for piece in pieces))
    # The largest first: small ones can still even out what the large ones left uneven. Then shard
    # by shard: the records of a unit are used side by side, and are to come from several drives.
    for piece in sorted(pieces, key=lambda piece: (-piece.nbytes, piece.shard, piece.order)):
        filling.put(piece, current[piece.record][piece.shard] if current else None)
    places = iter(filling.places[order] for order in range(len(pieces)))
    return {r.name: tuple(next(places) for _ in range(r.geometry.shard_count)) for r in records}


def _pieces(records: Sequence[Record]) -> list[_Piece]:
    pieces: list[_Piece] = []
    for record in records:
        geometry = record.geometry
        for shard in range(geometry.shard_count):
            left = record.nbytes - shard * geometry.shard_nbytes
            nbytes = round_up(min(left, geometry.shard_nbytes), ALIGNMENT)
            pieces.append(_Piece(order=len(pieces), record=record.name, shard=shard, nbytes=nbytes))
    return pieces


@dataclass(slots=True, kw_only=True)
class _Filling:
    """What each drive has got so far, and where each shard went."""

    shares: Mapping[int, float]
    slack: float
    used: dict[int, int]
    places: dict[int, int] = field(default_factory=dict)
    last: tuple[int, int] = (0, -1)  # bytes and drive of the shard that was put last

    @classmethod
    def of(cls, shares: Mapping[int, float], total: int) -> _Filling:
        """Return drives that hold nothing yet; those without a share are left out."""
        whole = sum(shares.values())
        taking = {n: share / whole for n, share in sorted(shares.items()) if share > 0}
        slack = _SLACK * total * min(taking.values()) / max(1, len(taking) - 1)
        return cls(shares=taking, slack=slack, used=dict.fromkeys(taking, 0))

    def put(self, piece: _Piece, current: int | None) -> None:
        """Give a shard its current drive, or one that is not its neighbour's, or the best.

        The best is the drive that is furthest behind its share. Each of the others is allowed
        only while it is not ahead, so that every run of shards is spread, not only all of them.
        """
        placed = sum(self.used.values()) + piece.nbytes
        before = self.places.get(piece.order - 1) if piece.shard else None
        alike = self.last[1] if self.last[0] == piece.nbytes else None

        def behind(drive: int) -> float:
            return (self.used[drive] + piece.nbytes) / self.shares[drive]

        def is_allowed(drive: int) -> bool:
            # Half: what is moved for the sake of balance must be better placed afterwards.
            part = piece.nbytes / 2 if drive == current else piece.nbytes
            return self.used[drive] + part <= self.shares[drive] * placed + self.slack

        best = min(self.shares, key=behind)
        turn = self._turn()
        drive = min(
            (drive for drive in self.shares if drive == best or is_allowed(drive)),
            key=lambda d: (d != current, d == before, d == alike, behind(d), turn[d]),
        )
        self.last = (piece.nbytes, drive)
        self.places[piece.order] = drive
        self.used[drive] += piece.nbytes

    def _turn(self) -> Mapping[int, int]:
        """Return which drive comes first where nothing else decides; it changes every round.

        Else as many drives as a unit has records would each have one role of all units.
        """
        drives = list(self.shares)
        first = len(self.places) // len(drives) % len(drives)
        return {drive: (index - first) % len(drives) for index, drive in enumerate(drives)}
