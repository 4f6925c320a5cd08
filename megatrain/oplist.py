"""A list of operations in the making, and the slabs that its operations use in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatrain.ops import ArenaName, Kind, Lane, Move, Op, Take
from tiering.records import ALIGNMENT, round_up


def spans(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """Cut ``[start, stop)`` at the multiples of ``length``."""
    while start < stop:
        end = min(stop, (start // length + 1) * length)
        yield start, end
        start = end


@dataclass(slots=True)
class Ring:
    """Slabs of one arena used in turn; remembers which operation frees each."""

    arena: ArenaName
    count: int
    uses: int = 0
    freed_by: dict[int, int] = field(default_factory=dict)

    def take(self, nbytes: int) -> tuple[Take, tuple[int, ...]]:
        """Return the next slab and the operation that must end before it is used again."""
        index = self.uses % self.count
        self.uses += 1
        earlier = self.freed_by.get(index)
        deps = () if earlier is None else (earlier,)
        return Take(arena=self.arena, index=index, nbytes=nbytes), deps

    def free(self, take: Take, op: int) -> None:
        """Note that ``op`` is the last to use ``take``."""
        self.freed_by[take.index] = op


def padded(length: int, itemsize: int) -> int:
    """Return the bytes that a direct transfer of ``length`` elements moves."""
    return round_up(length * itemsize, ALIGNMENT)


class OpList:
    """Operations in list order; each computation depends on the one before it."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._last_compute: tuple[int, ...] = ()

    def add(
        self,
        lane: Lane,
        kind: Kind,
        unit: str,
        span: tuple[int, int] = (0, 0),
        *,
        deps: Iterable[int] = (),
        takes: Sequence[Take] = (),
        frees: Sequence[Take] = (),
        source: Take | None = None,
        target: Take | None = None,
        moves: Sequence[Move] = (),
        nbytes: int = 0,
        flops: float = 0.0,
    ) -> int:
        """Append an operation and return its id."""
        moved = sum(move.read + move.written for move in moves)
        if lane is Lane.COMPUTE:
            deps = (*deps, *self._last_compute)
            self._last_compute = (len(self.ops),)
        op = Op(
            id=len(self.ops),
            lane=lane,
            kind=kind,
            unit=unit,
            start=span[0],
            stop=span[1],
            nbytes=nbytes or moved,
            flops=flops,
            deps=tuple(dict.fromkeys(deps)),
            takes=tuple(takes),
            frees=tuple(frees),
            source=source,
            target=target,
            moves=tuple(moves),
        )
        self.ops.append(op)
        return op.id

    def free_at(self, op: int, take: Take) -> None:
        """Let the operation ``op`` free ``take`` too."""
        old = self.ops[op]
        self.ops[op] = replace(old, frees=(*old.frees, take))
