"""The update: optimizer records in, Adam piece by piece, new records and weights out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from checkpoint.schema import Tensor
from megatrain.ops import ArenaName, Op, Take
from megatrain.optimizer import AdamStep, CpuAdam
from megatrain.shape import MOMENTS, PIECE
from megatrain.stage import TORCH_DTYPES, Stage, StepState, held
from tiering.checksum import ChunkCrc
from tiering.errors import MegatrainError
from tiering.recordio import Transfer

Rule = Callable[[str, int], AdamStep]


class DivergedError(MegatrainError):
    """The numbers of a run are of no use any more; what was committed is."""


@dataclass(slots=True)
class Ledger:
    """What the updates of a step leave behind: checksums per record, counts per parameter."""

    checksums: dict[str, ChunkCrc | np.ndarray] = field(default_factory=dict)

    def tables(self) -> dict[str, np.ndarray]:
        """Return the finished checksum tables."""
        return {
            name: crc.table() if isinstance(crc, ChunkCrc) else crc
            for name, crc in self.checksums.items()
        }


class Update:
    """Handlers of everything after the norm.

    ``counts`` maps each parameter to the updates it has had; it is advanced by :meth:`applied`.
    ``rule`` gives the constants for a parameter's n-th update.
    """

    def __init__(self, stage: Stage, adam: CpuAdam, counts: dict[str, int]) -> None:
        self.stage = stage
        self.adam = adam
        self.counts = counts
        self.rule: Rule | None = None
        self.ledger = Ledger()
        self._before = Ledger()
        self._has_applied = False
        self._known_odd: dict[tuple[str, int], int] = {}
        self._grad = torch.empty(PIECE, dtype=torch.float32)
        self._places = stage.plan.gradient_places()
        self._sections = stage.shape.update_sections(stage.plan.step.sizes.slab_length)

    # -- drives --------------------------------------------------------------------------------

    def read_state(self, op: Op, state: StepState) -> None:
        """Read a span of the optimizer's records."""
        roles = self.stage.shape.updated_roles
        self.stage.pool.read_all(self._transfers(held(op.target), roles, op))

    def read_grads(self, op: Op, state: StepState) -> None:
        """Read back the gradient of a span."""
        scratch, slab = self.stage.scratch, held(op.target)
        assert scratch is not None  # planned together with this operation
        offset, _ = self._sections["grads"]
        view = self.stage.memory.bytes(slab)[offset : offset + op.nbytes]
        scratch.read(op.unit, op.start * self.stage.shape.grad_itemsize, view)

    def write_state(self, op: Op, state: StepState) -> None:
        """Write the new records of a span to the working slot."""
        if state.skip:
            return
        roles = self.stage.shape.roles
        self.stage.pool.write_all(self._transfers(held(op.source), roles, op))

    def _transfers(self, slab: Take, roles: Sequence[str], op: Op) -> list[Transfer]:
        """Return what of a slab belongs to records on drives: each on another one, if there are."""
        return [
            Transfer(name, op.start * self.stage.shape.itemsize(role), self._bytes(slab, role, op))
            for role in roles
            if self.stage.pool.resident(name := f"{op.unit}.{role}") is None
        ]

    def flush(self, op: Op, state: StepState) -> None:
        """Write a record that only RAM holds to the working slot."""
        if not state.skip:
            self.flush_record(op.unit)

    def flush_record(self, name: str) -> None:
        """Write a record that only RAM holds to the working slot."""
        self.ledger.checksums[name] = self.stage.pool.flush(name)

    def _bytes(self, slab: Take, role: str, op: Op) -> memoryview:
        offset, _ = self._sections[role]
        itemsize = self.stage.shape.itemsize(role)
        nbytes = -(-(op.stop - op.start) * itemsize // 4096) * 4096
        return self.stage.memory.bytes(slab)[offset : offset + nbytes]

    # -- arithmetic ----------------------------------------------------------------------------

    def update(self, op: Op, state: StepState) -> None:
        """Apply the step to one span of a unit's parameters."""
        if state.skip:
            return
        views = {role: self._view(op, role) for role in self.stage.shape.roles}
        grads = self._dense(op)
        for tensor, start, stop in pieces(self.stage.units[op.unit].tensors, op.start, op.stop):
            if tensor.name in state.touched:
                self._update_piece(op, state, views, grads, tensor, (start, stop))
        if "weights" in views:
            views["weights"].copy_(views["master"])
        self._feed_checksums(op, views)

    def _update_piece(
        self,
        op: Op,
        state: StepState,
        views: Mapping[str, torch.Tensor],
        grads: torch.Tensor | None,
        tensor: Tensor,
        span: tuple[int, int],
    ) -> None:
        a, b = span[0] - op.start, span[1] - op.start
        grad = self._grad[: b - a]
        if grads is None:
            grad.zero_()
        else:
            grad.copy_(grads[a:b])
        self._add_outer(op, state, span, grad)
        if state.clip != 1.0:
            grad.mul_(state.clip)
        count = self.counts.get(tensor.name, 0)
        exp_avg, exp_avg_sq = (views[role][a:b] for role in MOMENTS)
        if count == 0:  # a new run begins with no moments, whatever the records hold
            exp_avg.zero_()
            exp_avg_sq.zero_()
        master, known = views["master"][a:b], self._known_odd
        if not self._has_applied and (odd := _not_finite(master)):
            known[tensor.name, span[0]] = odd  # the model came like that
        assert self.rule is not None  # set by begin()
        self.adam.update(
            master=master,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            grad=grad,
            step=self.rule(tensor.name, count + 1),
        )
        if _not_finite(master) > known.get((tensor.name, span[0]), 0):
            raise DivergedError(
                f"{tensor.name} is no longer finite after the update of step {state.number}; the "
                "step is not committed, and the store is as at the last commit: resume it with a "
                "lower train.lr and --allow-changes"
            )

    def _view(self, op: Op, role: str) -> torch.Tensor:
        resident = self.stage.resident(op.unit, role)
        if resident is not None:
            return resident[op.start : op.stop]
        record = self.stage.plan.records[f"{op.unit}.{role}"]
        return self._section(held(op.source), role, TORCH_DTYPES[record.dtype], op)

    def _section(self, slab: Take, role: str, dtype: torch.dtype, op: Op) -> torch.Tensor:
        offset, _ = self._sections[role]
        return self.stage.memory.tensor(slab, dtype, offset=offset, length=op.stop - op.start)

    def _dense(self, op: Op) -> torch.Tensor | None:
        """Return the dense gradient of the span, where there is one."""
        stage = self.stage
        length = min(op.stop, stage.shape.dense_grad_length(op.unit)) - op.start
        if length <= 0:
            return None
        place = self._places.get(op.unit)
        if place is not None:
            dense = stage.span(place, stage.dtype, op.start, op.start + length)
        else:
            dense = self._section(held(op.source), "grads", stage.dtype, op)[:length]
        missing = op.stop - op.start - length
        return torch.nn.functional.pad(dense, (0, missing)) if missing else dense

    def _add_outer(
        self, op: Op, state: StepState, span: tuple[int, int], grad: torch.Tensor
    ) -> None:
        """Put the gradients of the window's rows, or of the rest of the first unit, in place."""
        stage, shape = self.stage, self.stage.shape
        if op.unit != shape.outer_in.name:
            return
        take = Take(arena=ArenaName.OUTER_GRADS, index=0, nbytes=shape.outer_grads_nbytes)
        if span[0] >= shape.table_length:
            rest = stage.behind_rows(take, stage.dtype, shape.rest_length)
            grad.copy_(rest[span[0] - shape.table_length : span[1] - shape.table_length])
            return
        rows = stage.rows(take, stage.dtype, len(state.token_ids)).view(-1)
        put_rows(grad, rows, state.token_ids.numpy(), start=span[0], hidden=shape.hidden)

    def _feed_checksums(self, op: Op, views: Mapping[str, torch.Tensor]) -> None:
        for role, view in views.items():
            name = f"{op.unit}.{role}"
            if self.stage.pool.resident(name) is not None:
                continue  # its flush takes the checksum
            record = self.stage.plan.records[name]
            crc = self.ledger.checksums.get(name)
            if not isinstance(crc, ChunkCrc):
                crc = self.ledger.checksums[name] = ChunkCrc(record)
            data = view.view(torch.uint8).numpy().data
            crc.feed(op.start * record.itemsize, data)

    # -- life of a step ------------------------------------------------------------------------

    def begin(self, rule: Rule) -> None:
        """Prepare for a step."""
        self.rule = rule
        self._before, self.ledger = self.ledger, Ledger()

    def forget(self) -> None:
        """Go back to what the last applied step left: this one changed nothing."""
        self.ledger = self._before

    def applied(self, state: StepState) -> None:
        """Count the update of every parameter that received a gradient."""
        self._has_applied = True
        for name in state.touched:
            self.counts[name] = self.counts.get(name, 0) + 1


def _not_finite(flat: torch.Tensor) -> int:
    """Return how many elements are infinite or not a number.

    A sum is not finite if any element is not, and reads a piece while it is in cache; only one
    that overflowed, or is of such elements, takes a second look.
    """
    return 0 if math.isfinite(float(flat.sum())) else int((~flat.isfinite()).sum())


def pieces(tensors: tuple[Tensor, ...], start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
    """Cut the part of each tensor that lies in ``[start, stop)`` at its multiples of a piece.

    Cuts are counted from the tensor's own start; a span's ends add cuts at multiples of 64,
    which the kernel's vectors do not notice.
    """
    for tensor in tensors:
        end = tensor.end
        at, limit = max(start, tensor.offset), min(stop, end)
        while at < limit:
            cut = tensor.offset + ((at - tensor.offset) // PIECE + 1) * PIECE
            yield tensor, at, min(cut, limit)
            at = min(cut, limit)


def put_rows(
    grad: torch.Tensor, rows: torch.Tensor, ids: np.ndarray, *, start: int, hidden: int
) -> None:
    """Overwrite the elements of ``grad`` that belong to the given rows of the table.

    ``grad`` holds the table's elements from ``start`` on; ``rows`` are the rows ``ids``, sorted,
    behind one another. Their places in ``grad`` are zero when the head is tied (cut out) and
    when it is not (no dense gradient), so they replace and need not be added.
    """
    stop = start + len(grad)
    first = int(np.searchsorted(ids, start // hidden))
    last = int(np.searchsorted(ids, -(-stop // hidden)))
    for k in range(first, last):
        at = int(ids[k]) * hidden
        a, b = max(at, start), min(at + hidden, stop)
        grad[a - start : b - start].copy_(rows[k * hidden + a - at : k * hidden + b - at])
