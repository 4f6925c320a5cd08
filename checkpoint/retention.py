"""Dropping generations of a store, and the slots that nobody needs afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering.manifest import Generation
from tiering.store import StoreWriter, open_newest_whole

_FREE_SLOTS = 1  # what training writes the next generation to


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """One generation that goes, or is gone; ``damage`` is empty if it is whole."""

    generation: int
    step: int
    damage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was dropped if ``done``, else what would be.

    ``kept`` are the generations that stay; ``newest`` is the number of the last of them
    afterwards, another one if what follows it is dropped. ``slots`` are removed, which frees
    ``nbytes``; those in ``held`` are not, because a process reads them.
    """

    store: str
    done: bool
    kept: tuple[int, ...]
    newest: int
    dropped: tuple[Dropped, ...]
    slots: tuple[int, ...]
    held: tuple[int, ...]
    nbytes: int

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to drop."""
        return not self.dropped and not self.slots


def prune(store: Path, *, keep: int = 1, yes: bool = False) -> Pruned:
    """Keep the last ``keep`` whole generations of a store and one slot to write to.

    Damaged generations are dropped. Nothing changes without ``yes``. What a process reads stays
    until it has ended; prune again then. Interrupted anywhere, the store is whole.

    Raises:
        LockedError: A process writes the store.
        CorruptionError: No generation is whole.
    """
    with open_newest_whole(store, run_id="prune") as writer:
        planned = _plan(writer, keep, done=yes)
        if yes:
            writer.make_newest()
            writer.drop_generations(keep=keep)
            writer.drop_free_slots(keep=_FREE_SLOTS)
        return planned


def _plan(writer: StoreWriter, keep: int, *, done: bool) -> Pruned:
    listed = writer.generations
    newest = writer.manifest.generation
    whole = [g for g in listed if g.number not in writer.damaged]
    kept = whole[-keep:]
    last = listed[-1].number
    slots, held = writer.free_slots(kept, keep=_FREE_SLOTS)
    return Pruned(
        store=str(writer.path),
        done=done,
        kept=tuple(g.number for g in kept),
        newest=newest if newest == last else last + 1,
        dropped=tuple(_dropped(writer, g) for g in _without(listed, kept)),
        slots=tuple(slots),
        held=tuple(held),
        nbytes=writer.allocated_nbytes(slots),
    )


def _without(listed: Sequence[Generation], kept: Sequence[Generation]) -> list[Generation]:
    return [generation for generation in listed if generation not in kept]


def _dropped(writer: StoreWriter, generation: Generation) -> Dropped:
    fault = writer.damaged.get(generation.number, "")
    return Dropped(generation=generation.number, step=generation.step, damage=str(fault))
