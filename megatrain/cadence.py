"""How often to commit. Pure."""

from __future__ import annotations

import math

FLUSH_SHARE = 0.03


def cadence(*, resident: bool, flush_s: float, step_s: float, max_lost_s: float) -> int:
    """Return the steps between commits.

    Records on drives are written each step anyway, so without resident ones every step is
    committed. Else the smallest cadence whose flush costs less than 3 %, amortised, that never
    risks more than ``max_lost_s`` of work.
    """
    if not resident or step_s <= 0:
        return 1
    cheap = math.ceil(flush_s / (FLUSH_SHARE * step_s))
    allowed = int(max_lost_s // step_s)
    return max(1, min(cheap, allowed))
