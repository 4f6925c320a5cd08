"""Which tier each record lives in while training. Pure, decided once before the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from tiering.records import Record, Tier

_NOWHERE: Set[str] = frozenset()


def place(
    requests: Sequence[Record], budgets: Mapping[Tier, int], *, tolerant: Set[str] = _NOWHERE
) -> Mapping[str, Tier]:
    """Return a tier for every record: in the given order, the fastest that has room for it whole.

    ``budgets`` are the bytes of pinned memory and of cxl; a tier that is not named takes no
    record. Only ``tolerant`` records may go to cxl. They go there before their turn where others
    would find no pinned memory left otherwise: in cxl a record is slower, on a drive it is moved.
    Every record has its place in the store anyway, so the tier of its shards takes the rest.
    """
    left = {tier: budgets.get(tier, 0) for tier in (Tier.PINNED, Tier.CXL)}
    kept_free = _kept_free(requests, left, tolerant)
    places = {}
    for record in requests:
        nbytes, may = record.padded_nbytes, record.name in tolerant
        if nbytes <= left[Tier.PINNED] - (kept_free if may else 0):
            tier = Tier.PINNED
        elif may and nbytes <= left[Tier.CXL]:
            tier = Tier.CXL
        elif may and nbytes <= left[Tier.PINNED]:
            tier = Tier.PINNED
        else:
            tier = record.tier
        if tier in left:
            left[tier] -= nbytes
        places[record.name] = tier
    return places


def _kept_free(requests: Sequence[Record], left: Mapping[Tier, int], tolerant: Set[str]) -> int:
    """Return how much pinned memory tolerant records leave to the others, as cxl has room."""
    may = sum(record.padded_nbytes for record in requests if record.name in tolerant)
    others = sum(record.padded_nbytes for record in requests) - may
    return min(others, max(0, left[Tier.PINNED] - max(0, may - left[Tier.CXL])))
