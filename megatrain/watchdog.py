"""Says which operation does not end, and who waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from checkpoint.sizes import format_size
from megatrain.ops import Lane, Op

log = logging.getLogger(__name__)


def _nothing(error: BaseException) -> None:
    """Do what is done about a lane that never ends where nobody says more: keep waiting."""


def _no_files(thread: int, op: Op) -> Sequence[Path]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How lanes are watched.

    ``stall_warning_s`` is how long an operation may take before it is named. ``files`` returns
    what a thread waits for while it does an operation. ``leave`` is called once an error could
    not end the run within ``stall_warning_s`` because another lane is stuck; it may not return.
    """

    stall_warning_s: float = 60.0
    files: Callable[[int, Op], Sequence[Path]] = _no_files
    leave: Callable[[BaseException], None] = _nothing


class Seat(NamedTuple):
    """One thread of a lane."""

    lane: Lane
    number: int = 0

    def __str__(self) -> str:
        return f"{self.lane} {self.number}" if self.number else str(self.lane)


@dataclass(slots=True, kw_only=True)
class Place:
    """Where a seat is in its list: what it does or waits to do next, since when."""

    thread: int
    op: Op | None = None
    waiting: bool = False
    since: float = 0.0


@dataclass(slots=True)
class Watchdog:
    """Names the operations of one list that do not end, each time after twice as long.

    The wait doubles for all operations of a kind: where each takes long, a few lines say so.
    """

    watch: Watch
    _next_s: dict[str, float] = field(default_factory=dict)

    def look(
        self, places: Mapping[Seat, Place], waits: Mapping[Lane, frozenset[Lane]], now: float
    ) -> None:
        """Log what has not moved for too long; ``waits`` says which lanes each one waits for."""
        for seat, place in places.items():
            if place.op is None or place.waiting:
                continue
            after_s = self._next_s.setdefault(place.op.kind, self.watch.stall_warning_s)
            if now - place.since >= after_s:
                self._next_s[place.op.kind] = 2 * after_s
                self._say(seat, places, waits, now)

    def _say(
        self,
        seat: Seat,
        places: Mapping[Seat, Place],
        waits: Mapping[Lane, frozenset[Lane]],
        now: float,
    ) -> None:
        behind = [
            f"{other} (for {_named(place.op)})"
            for other, place in places.items()
            if place.op and seat.lane in _reached(other.lane, waits)
        ]
        log.warning(
            "lane %s has not moved for %.0f s: %s; waiting for it: %s",
            seat,
            now - places[seat].since,
            self.doing(places[seat]),
            ", ".join(behind) or "no other lane",
        )

    def doing(self, place: Place) -> str:
        """Return what a lane does, with bytes, and paths as far as there are any."""
        op = place.op
        if op is None:
            return "nothing"
        size = f", {format_size(op.nbytes)}" if op.nbytes else ""
        paths = ", ".join(map(str, self.watch.files(place.thread, op)))
        return f"{_named(op)}{size}{paths and f', {paths}'}"


def _named(op: Op) -> str:
    return f"{op.kind} of {op.unit}" if op.unit else str(op.kind)


def _reached(lane: Lane, waits: Mapping[Lane, frozenset[Lane]]) -> set[Lane]:
    """Return every lane that ``lane`` waits for, also through others."""
    found: set[Lane] = set()
    left = set(waits.get(lane, ()))
    while left:
        other = left.pop()
        if other not in found:
            found.add(other)
            left |= waits.get(other, frozenset())
    return found
