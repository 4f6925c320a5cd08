"""Which tier each record lives in while training. Pure, decided once before the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiering.records import Record, Tier

_MEMORY = frozenset({Tier.PINNED, Tier.CXL})


def place(requests: Sequence[Record], budgets: Mapping[Tier, int]) -> Mapping[str, Tier]:
    """Return a tier for every record: in the given order, the fastest that has room for it whole.

    ``budgets`` are bytes per tier; a tier that is not named takes no record. Every record has its
    place in the store anyway, so the tier of its shards takes what fits nowhere else.
    """
    left = {tier: budgets[tier] for tier in Tier if tier in budgets and tier in _MEMORY}
    places = {}
    for record in requests:
        room = (tier for tier, nbytes in left.items() if record.padded_nbytes <= nbytes)
        tier = next(room, record.tier)
        if tier in left:
            left[tier] -= record.padded_nbytes
        places[record.name] = tier
    return places
