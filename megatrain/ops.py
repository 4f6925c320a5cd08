"""What a step is made of: operations, the memory they hold and the bytes they move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatrain.shape import Shape, Sizes
from tiering.records import Tier


class ScheduleError(Exception):
    """A list of operations that cannot be run as it is: a bug, not a state of the machine."""


class Lane(StrEnum):
    """One first-in-first-out queue of the executor."""

    IO_READ = "io_read"
    COPY_IN = "copy_in"
    COMPUTE = "compute"
    COPY_OUT = "copy_out"
    HOST = "host"
    IO_WRITE = "io_write"


class Kind(StrEnum):
    """What an operation does."""

    READ_ROWS = "read_rows"
    COPY_ROWS = "copy_rows"
    READ_WEIGHTS = "read_weights"
    COPY_WEIGHTS = "copy_weights"
    CAPTURE = "capture"
    FORWARD = "forward"
    HEAD = "head"
    BACKWARD = "backward"
    OUTER_BACKWARD = "outer_backward"
    COPY_GRADS = "copy_grads"
    COPY_OUTER_GRADS = "copy_outer_grads"
    SUM_SQUARES = "sum_squares"
    WRITE_GRADS = "write_grads"
    NORM = "norm"
    READ_STATE = "read_state"
    READ_GRADS = "read_grads"
    UPDATE = "update"
    WRITE_STATE = "write_state"
    FLUSH = "flush"
    COMMIT = "commit"


class ArenaName(StrEnum):
    """What a piece of planned memory is for."""

    RECORDS = "records"
    STAGING = "staging slabs"
    UPDATE = "update slabs"
    GRAD_SLABS = "gradient slabs"
    GRADIENTS = "gradients"
    HOST_ROWS = "embedding rows"
    OUTER_GRADS = "embedding gradients"
    BUFFERS = "layer buffers"
    HEAD = "head buffer"
    OUTER = "outer buffer"
    ACCUMULATORS = "layer accumulators"
    HEAD_ACCUMULATOR = "head accumulator"
    OUTER_ACCUMULATOR = "outer accumulator"
    ACTIVATIONS = "activations"


DEVICE_ARENAS = frozenset(
    {
        ArenaName.BUFFERS,
        ArenaName.HEAD,
        ArenaName.OUTER,
        ArenaName.ACCUMULATORS,
        ArenaName.HEAD_ACCUMULATOR,
        ArenaName.OUTER_ACCUMULATOR,
        ArenaName.ACTIVATIONS,
    }
)


RESIDENT = frozenset({Tier.PINNED, Tier.CXL})  # tiers that the host can address


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A hold on ``nbytes`` of the ``index``-th slab of an arena."""

    arena: ArenaName
    index: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Bytes that an operation reads from a tier or writes to it."""

    tier: Tier
    read: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of a step. ``source`` and ``target`` are holds that it works on."""

    id: int
    lane: Lane
    kind: Kind
    unit: str
    start: int = 0
    stop: int = 0
    nbytes: int = 0
    flops: float = 0.0
    deps: tuple[int, ...] = ()
    takes: tuple[Take, ...] = ()
    frees: tuple[Take, ...] = ()
    source: Take | None = None
    target: Take | None = None
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step is scheduled for: the shape, the sizes chosen, the place of each record.

    ``homes`` are the tiers of the records' shards, to which what lives in memory is flushed.
    """

    shape: Shape
    sizes: Sizes
    placement: Mapping[str, Tier]
    homes: Mapping[str, Tier]
    device_in_ram: bool = False
    commit: bool = True

    def tier(self, unit: str, role: str) -> Tier:
        """Return where the record of ``role`` of ``unit`` lives."""
        return self.placement[f"{unit}.{role}"]

    def in_place(self, unit: str) -> bool:
        """Return whether the device computes with a unit's streamed record where it lies."""
        return self.device_in_ram and self.resident(unit, self.shape.streamed)

    def gradients_in_place(self) -> bool:
        """Return whether the device adds up a layer's gradient where it waits for its update."""
        same = self.shape.layer_accumulator_itemsize == self.shape.grad_itemsize
        return self.device_in_ram and self.sizes.gradients_in_ram and same

    def resident(self, unit: str, role: str) -> bool:
        """Return whether that record lives in memory that the host can address."""
        return self.tier(unit, role) in RESIDENT
