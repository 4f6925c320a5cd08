"""Changing how a store lies on its drives: which drives, how shards are cut and encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from checkpoint.recode import Cut, Recoded, recode
from tiering.moving import Moved, move_store

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """What was done: None for what was not asked for, or was so already."""

    moved: Moved | None
    recoded: Recoded | None


def shard(
    store: Path,
    *,
    drives: Sequence[Path] = (),
    cut: Cut | None = None,
    progress: Callable[[str], AbstractContextManager[Progress]],
) -> Sharded:
    """Move the store to ``drives``, then commit it once more cut like ``cut``.

    Each can be interrupted and asked for again. ``progress`` lends what is called with the bytes
    done and the bytes in all; it is given a title.

    Raises:
        LockedError: The store is in use.
        RefusedError: A folder cannot be a drive, or there is too little room.
        CorruptionError: The store is not what was committed.
    """
    moved = recoded = None
    if drives:
        with progress("moving") as on_progress:
            moved = move_store(store, drives, on_progress=on_progress)
    if cut is not None:
        with progress("encoding") as on_progress:
            recoded = recode(store, cut, on_progress=on_progress)
    return Sharded(moved=moved, recoded=recoded)
