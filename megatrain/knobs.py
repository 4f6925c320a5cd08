"""Which settings of a run file would make a run fit that does not: tried on the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatrain.config import RunConfig, with_sets
from megatrain.planner import Plan
from megatrain.report import size
from megatrain.shape import PIECE
from tiering.errors import RefusedError

SHOWN = 2
_MIB = 1 << 20
_LEAST = {  # below these no run is worth having
    "train.micro_batch": 1,
    "train.accumulate": 1,
    "data.max_seq_len": 64,
    "train.loss_chunk": 16,
}

Need = Callable[[RunConfig], int]
"""Returns the bytes that a run of these settings needs; RefusedError where it has no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One setting, what the run needs with it, and whether that fits."""

    key: str
    value: str
    need: int
    fits: bool

    def __str__(self) -> str:
        text = f"{self.key}: {self.value}"
        return f"  {text:<30} needs {size(self.need)}{'' if self.fits else ', still too much'}"


def ladders(config: RunConfig, plan: Plan, excess: int) -> Mapping[str, Sequence[str]]:
    """Return the values to try for each key, from the mildest to the strongest.

    ``plan`` is that of ``config``, which needs ``excess`` bytes too many.
    """
    memory, resident = config.memory, plan.resident_nbytes
    slab = plan.step.sizes.slab_length * plan.step.shape.compute_itemsize
    least_slab = PIECE * plan.step.shape.compute_itemsize
    numbers = {
        "train.micro_batch": config.train.micro_batch,
        "train.accumulate": config.train.accumulate,
        "data.max_seq_len": config.data.max_seq_len,
        "train.loss_chunk": config.train.loss_chunk,
    }
    least_ram = plan.host_nbytes - resident
    found = {
        "memory.ram": [_mib(n) for n in (plan.host_nbytes - excess, least_ram) if n >= _MIB],
        "memory.resident": [_mib(n) for n in (resident - excess, 0) if 0 <= n < resident],
        "memory.gradients": ["disk"] if memory.gradients != "disk" else [],
        "memory.slab": [f"{n >> 10}KiB" for n in _halves(slab, least_slab)],
    }
    return found | {key: [*map(str, _halves(n, _LEAST[key]))] for key, n in numbers.items()}


def _mib(nbytes: int) -> str:
    return f"{nbytes // _MIB}MiB"


def _halves(value: int, least: int) -> Iterator[int]:
    while value > least:
        value = max(least, value // 2)
        yield value


def advise(
    config: RunConfig, values: Mapping[str, Sequence[str]], need: Need, *, now: int, limit: int
) -> list[Advice]:
    """Return the settings that bring the need down from ``now``, the most effective first.

    A setting is judged by its strongest value and shown with the mildest that fits.
    """
    found = []
    for key, ladder in values.items():
        strongest = _try(config, key, ladder[-1], need) if ladder else None
        if strongest is not None and strongest < now:
            found.append((strongest, _mildest(config, key, ladder, need, strongest, limit)))
    return [advice for _, advice in sorted(found, key=lambda pair: pair[0])]


def _mildest(
    config: RunConfig, key: str, ladder: Sequence[str], need: Need, strongest: int, limit: int
) -> Advice:
    if strongest <= limit:
        for value in ladder[:-1]:
            tried = _try(config, key, value, need)
            if tried is not None and tried <= limit:
                return Advice(key=key, value=value, need=tried, fits=True)
    return Advice(key=key, value=ladder[-1], need=strongest, fits=strongest <= limit)


def _try(config: RunConfig, key: str, value: str, need: Need) -> int | None:
    try:
        return need(with_sets(config, [f"{key}={value}"]))
    except RefusedError:  # no plan with that value
        return None


def listed(found: Sequence[Advice]) -> str:
    """Return the best of ``found`` as lines of a message."""
    if not found:
        return "no setting of the run file makes it smaller"
    return "\n".join(["what would help most:", *map(str, found[:SHOWN])])
