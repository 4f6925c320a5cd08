"""Gradients out: from the device through slabs to RAM or a drive, and their exact global norm."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from megatrain.ops import ArenaName, Op
from megatrain.stage import Stage, StepState, held
from megatrain.streaming import accumulator_dtype

SQUARES = 1 << 15  # elements; torch sums so few in one thread: the cores belong to the backward


class Gradients:
    """Handlers between the last computation on a unit and the first update."""

    def __init__(self, stage: Stage, *, max_norm: float | None) -> None:
        self.stage = stage
        self.max_norm = max_norm
        self._piece = torch.empty(SQUARES, dtype=torch.float32)

    def copy_grads(self, op: Op, state: StepState) -> None:
        """Round a span of the device's accumulator into its slab, or into its place in RAM."""
        source = self._accumulated(op)
        target = held(op.target)
        # a slab of the ring holds one span; a unit's place in RAM holds them all
        start = op.start if target.arena is ArenaName.GRADIENTS else 0
        slab = self.stage.span(target, self.stage.dtype, start, start + op.stop - op.start)
        slab.copy_(source, non_blocking=True)

    def _accumulated(self, op: Op) -> torch.Tensor:
        shape, take = self.stage.shape, held(op.source)
        if take.arena is ArenaName.HEAD_ACCUMULATOR:
            base = shape.outer_out.length if op.unit == shape.outer_in.name else 0
            kind = accumulator_dtype(shape.head_accumulator_itemsize, self.stage.dtype)
        else:
            base = 0
            kind = accumulator_dtype(shape.layer_accumulator_itemsize, self.stage.dtype)
        return self.stage.span(take, kind, base + op.start, base + op.stop)

    def copy_outer_grads(self, op: Op, state: StepState) -> None:
        """Round the gradients of the window's rows, and of the rest, into host memory."""
        stage, shape = self.stage, self.stage.shape
        source, target, count = held(op.source), held(op.target), len(state.token_ids)
        rows = stage.rows(source, torch.float32, count)
        stage.rows(target, stage.dtype, count).copy_(rows, non_blocking=True)
        rest = stage.behind_rows(source, torch.float32, shape.rest_length)
        stage.behind_rows(target, stage.dtype, shape.rest_length).copy_(rest, non_blocking=True)

    def sum_squares(self, op: Op, state: StepState) -> None:
        """Add the squares of what will be applied, in fp32 pieces that no slab size moves."""
        before = len(state.squares)
        for piece in self._pieces(op, state):
            state.squares.append(self._square(piece))
        if not all(math.isfinite(square) for square in state.squares[before:]):
            state.odd += [name for name, part in self._parts(op, state) if self._is_odd(part)]

    def _square(self, piece: torch.Tensor) -> float:
        return float(self._piece[: len(piece)].copy_(piece).square_().sum())

    def _is_odd(self, flat: torch.Tensor) -> bool:
        return not all(math.isfinite(self._square(piece)) for piece in cut(flat))

    def _parts(self, op: Op, state: StepState) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradient of each parameter, as far as it lies in the span."""
        stage, take = self.stage, held(op.source)
        tensors, first = stage.units[op.unit].tensors, op.start
        if take.arena is ArenaName.OUTER_GRADS:
            rows = stage.rows(take, stage.dtype, len(state.token_ids)).view(-1)
            yield tensors[0].name, rows
            first = stage.shape.table_length
            flat = stage.behind_rows(take, stage.dtype, stage.shape.rest_length)
        else:
            start = op.start if take.arena is ArenaName.GRADIENTS else 0
            flat = stage.span(take, stage.dtype, start, start + op.stop - op.start)
        for tensor in tensors:
            a, b = max(tensor.offset - first, 0), min(tensor.end - first, len(flat))
            if a < b:
                yield tensor.name, flat[a:b]

    def _pieces(self, op: Op, state: StepState) -> Iterator[torch.Tensor]:
        stage, take = self.stage, held(op.source)
        if take.arena is ArenaName.OUTER_GRADS:
            yield from cut(stage.rows(take, stage.dtype, len(state.token_ids)).view(-1))
            yield from cut(stage.behind_rows(take, stage.dtype, stage.shape.rest_length))
            return
        start = op.start if take.arena is ArenaName.GRADIENTS else 0
        yield from cut(stage.span(take, stage.dtype, start, start + op.stop - op.start))

    def write_grads(self, op: Op, state: StepState) -> None:
        """Put a slab aside on a drive until the norm is known."""
        stage = self.stage
        assert stage.scratch is not None  # planned together with this operation
        offset = op.start * stage.shape.grad_itemsize
        stage.scratch.write(op.unit, offset, stage.memory.bytes(held(op.source))[: op.nbytes])

    def norm(self, op: Op, state: StepState) -> None:
        """Know the loss and the global norm; decide whether and how the step is applied."""
        state.loss = math.fsum(float(loss) for loss in state.losses)
        # exactly rounded, so the order in which slabs arrived cannot show
        state.grad_norm = math.sqrt(math.fsum(state.squares)) if not state.odd else math.nan
        state.skip = not (math.isfinite(state.grad_norm) and math.isfinite(state.loss))
        if self.max_norm:
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6
            state.clip = min(1.0, self.max_norm / (state.grad_norm + 1e-6))


def cut(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a 1-D tensor into the pieces whose squares are summed."""
    for at in range(0, len(flat), SQUARES):
        yield flat[at : at + SQUARES]
