"""The learning rate as a pure function of the number of updates done and the stored horizon."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


def lr(step: int, *, base: float, schedule: Schedule, warmup_steps: int, steps: int) -> float:
    """Return the rate of the update that follows ``step`` finished ones.

    Warm-up rises linearly from 0 and reaches ``base`` at ``warmup_steps``; the decay ends with 0 at
    ``steps`` and stays there. Same values, bit for bit, as torch's ``LambdaLR`` over these factors.
    """
    return base * _factor(step, schedule, warmup_steps, steps)


def _factor(step: int, schedule: Schedule, warmup_steps: int, steps: int) -> float:
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    span = max(1, steps - warmup_steps)
    left = min(1.0, max(0.0, (steps - step) / span))  # clamped: a decay never rises again
    return left if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
