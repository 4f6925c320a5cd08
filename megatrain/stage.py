"""What the operations of a run work on, and what one step knows about itself."""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from checkpoint.schema import Unit
from megatrain.allocator import HeapKeeper
from megatrain.data.batches import MicroBatch, Window
from megatrain.memory import Memory
from megatrain.model.capture import LayerCall
from megatrain.model.streamed import OuterIn, StreamedModel
from megatrain.ops import RESIDENT, ArenaName, Kind, Op, Take
from megatrain.planner import Plan
from megatrain.shape import Shape
from tiering.pool import Pool
from tiering.records import ALIGNMENT, Tier, round_up
from tiering.scratch import Scratch

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(slots=True)
class Traffic:
    """Bytes read and written so far."""

    read: int = 0
    written: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, read: int = 0, written: int = 0) -> None:
        """Count bytes; lanes may do so at once."""
        with self._guard:
            self.read += read
            self.written += written


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The parts that all operations of a run share.

    ``scratch`` holds gradients when they do not fit in RAM. ``resident_traffic`` counts, by
    tier, what the operations read from resident records and write to them.
    """

    plan: Plan
    memory: Memory
    pool: Pool
    scratch: Scratch | None
    model: StreamedModel
    units: Mapping[str, Unit]
    device: torch.device
    dtype: torch.dtype
    heap: HeapKeeper = field(default_factory=HeapKeeper)
    resident_traffic: Mapping[Tier, Traffic] = field(
        default_factory=lambda: {tier: Traffic() for tier in sorted(RESIDENT)}
    )

    @property
    def shape(self) -> Shape:
        """The sizes that the schedule was built for."""
        return self.plan.step.shape

    def resident(self, unit: str, role: str) -> torch.Tensor | None:
        """Return a record kept in RAM as a 1-D tensor that aliases it."""
        record = self.plan.records[f"{unit}.{role}"]
        view = self.pool.resident(record.name)
        if view is None:
            return None
        return torch.frombuffer(view, dtype=TORCH_DTYPES[record.dtype], count=record.length)

    def count(self, op: Op, state: StepState) -> None:
        """Add what ``op`` moves within RAM to the traffic."""
        if state.skip or op.kind is Kind.READ_ROWS:
            return  # nothing moved; or fewer rows than planned, counted where they are gathered
        for move in op.moves:
            if move.tier in self.resident_traffic:
                self.resident_traffic[move.tier].add(read=move.read, written=move.written)

    # -- views of slabs ------------------------------------------------------------------------

    def span(self, take: Take, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of a slab."""
        return self.memory.tensor(take, dtype, offset=start * dtype.itemsize, length=stop - start)

    def rows(self, take: Take, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return the first ``count`` embedding rows of a slab, [count, H]."""
        hidden = self.shape.hidden
        return self.memory.tensor(take, dtype, length=count * hidden).view(count, hidden)

    def behind_rows(self, take: Take, dtype: torch.dtype, length: int) -> torch.Tensor:
        """Return ``length`` elements of a slab behind the place of its rows."""
        offset = round_up(self.shape.rows * self.shape.hidden * dtype.itemsize, ALIGNMENT)
        return self.memory.tensor(take, dtype, offset=offset, length=length)

    def activation(self, index: int, state: StepState, batch: int) -> torch.Tensor:
        """Return the place of one micro-batch's hidden states, [B, S, H].

        ``index`` counts layers' inputs; -1 is the place of the gradient.
        """
        seats = len(self.plan.arenas[ArenaName.ACTIVATIONS])
        take = Take(
            arena=ArenaName.ACTIVATIONS, index=index % seats, nbytes=self.shape.hidden_nbytes
        )
        start, (b, s) = state.token_offsets[batch], state.batch_shapes[batch]
        hidden = self.shape.hidden
        flat = self.span(take, self.dtype, start * hidden, (start + b * s) * hidden)
        return flat.view(b, s, hidden)


@dataclass(slots=True, kw_only=True)
class StepState:
    """One step in progress. Each field is written by one lane and read after a dependency."""

    number: int
    seed: int
    batches: Sequence[MicroBatch]
    targets: int
    token_ids: torch.Tensor
    token_offsets: list[int] = field(default_factory=list)
    batch_shapes: list[tuple[int, int]] = field(default_factory=list)
    outer: OuterIn | None = None
    calls: list[Sequence[LayerCall]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    loss: float = math.nan
    grad_norm: float = math.nan
    clip: float = 1.0
    skip: bool = False

    @classmethod
    def of(cls, window: Window, *, number: int, seed: int) -> StepState:
        """Return the state of the step that will be update ``number``."""
        ids = torch.cat([batch.input_ids.reshape(-1) for batch in window.micro_batches])
        state = cls(
            number=number,
            seed=seed,
            batches=window.micro_batches,
            targets=window.targets,
            token_ids=torch.unique(ids),
        )
        used = 0
        for batch in window.micro_batches:
            b, s = batch.input_ids.shape
            state.token_offsets.append(used)
            state.batch_shapes.append((b, s))
            used += b * s
        return state

    def call_seed(self, unit: int, batch: int) -> int:
        """Return the seed of one unit's computation on one micro-batch.

        A pure function, so recomputation, resumption and any placement see the same dropout.
        """
        packed = struct.pack("<4q", self.seed, self.number, unit, batch)
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def held(take: Take | None) -> Take:
    """Return the hold that the schedule gave an operation."""
    if take is None:
        raise RuntimeError("the schedule gave an operation no memory to work on")
    return take
