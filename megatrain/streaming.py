"""Weights in and the computation: forward, head and backward, unit by unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatrain.data.batches import MicroBatch
from megatrain.model.streamed import OuterIn
from megatrain.ops import ArenaName, Op, Take
from megatrain.stage import Stage, StepState, held
from tiering.records import ALIGNMENT, round_up


class Streaming:
    """Handlers of the lanes io_read, copy_in and compute before any gradient leaves."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.index = {unit.name: i for i, unit in enumerate(stage.shape.units)}

    # -- the embedding's rows ------------------------------------------------------------------

    def read_rows(self, op: Op, state: StepState) -> None:
        """Gather the rows of the window's tokens into host memory."""
        stage, take = self.stage, held(op.target)
        rows = stage.rows(take, stage.dtype, len(state.token_ids))
        table = stage.resident(op.unit, stage.shape.streamed)
        if table is None:
            self._read_rows(op.unit, take, rows, state.token_ids.tolist())
            return
        tier = stage.plan.step.tier(op.unit, stage.shape.streamed)
        stage.resident_traffic[tier].add(read=rows.nbytes)
        words = stage.model.vocab_size
        torch.index_select(
            table[: words * stage.shape.hidden].view(words, -1), 0, state.token_ids, out=rows
        )

    def _read_rows(self, unit: str, take: Take, rows: torch.Tensor, ids: list[int]) -> None:
        shape = self.stage.shape
        name = f"{unit}.{shape.streamed}"
        row = shape.hidden * shape.compute_itemsize
        bounce = self.stage.memory.bytes(take)[round_up(shape.rows_nbytes, ALIGNMENT) :]
        done = 0
        for first, last, start, stop in extents(ids, row, shape.row_bounce_nbytes):
            self.stage.pool.gather(name, start, bounce[: stop - start])
            block = torch.frombuffer(bounce, dtype=torch.uint8, count=stop - start)
            for token in ids[first:last]:
                at = token * row - start
                rows[done].copy_(block[at : at + row].view(rows.dtype))
                done += 1

    def copy_rows(self, op: Op, state: StepState) -> None:
        """Bring the gathered rows to the device and set the outer part up."""
        stage, count = self.stage, len(state.token_ids)
        target = held(op.target)
        rows = stage.rows(target, stage.dtype, count)
        rows.copy_(stage.rows(held(op.source), stage.dtype, count), non_blocking=True)
        shape = stage.shape
        lead = shape.table_length - shape.rest_start if shape.rest_length else 0
        rest = stage.behind_rows(target, stage.dtype, shape.rest_span)[lead:]
        state.outer = OuterIn(
            token_ids=state.token_ids.to(stage.device, non_blocking=True), rows=rows, rest=rest
        )
        state.batches = [on_device(batch, stage.device) for batch in state.batches]

    # -- weights -------------------------------------------------------------------------------

    def read_weights(self, op: Op, state: StepState) -> None:
        """Read a slab of the streamed record."""
        shape = self.stage.shape
        slab = self.stage.memory.bytes(held(op.target))
        name = f"{op.unit}.{shape.streamed}"
        self.stage.pool.read(name, op.start * shape.compute_itemsize, slab[: op.nbytes])

    def copy_weights(self, op: Op, state: StepState) -> None:
        """Copy a slab, or a resident record, to the device."""
        stage = self.stage
        if op.source is None:
            resident = stage.resident(op.unit, stage.shape.streamed)
            assert resident is not None  # the schedule reads what is not resident
            source = resident[op.start : op.stop]
        else:
            source = stage.span(op.source, stage.dtype, 0, op.stop - op.start)
        self._destination(op).copy_(source, non_blocking=True)

    def _destination(self, op: Op) -> torch.Tensor:
        stage, take = self.stage, held(op.target)
        shape, outer = stage.shape, op.unit == stage.shape.outer_in.name
        if take.arena is ArenaName.OUTER:
            rest = stage.behind_rows(take, stage.dtype, shape.rest_span)
            return rest[op.start - shape.rest_start : op.stop - shape.rest_start]
        base = shape.outer_out.length if take.arena is ArenaName.HEAD and outer else 0
        return stage.span(take, stage.dtype, base + op.start, base + op.stop)

    # -- computation ---------------------------------------------------------------------------

    def capture(self, op: Op, state: StepState) -> None:
        """Run the model's own front; keep the first layer's inputs and every layer's call."""
        self.stage.heap.before("layers")
        stage, outer = self.stage, _outer(state)
        for b, batch in enumerate(state.batches):
            captured = stage.model.capture(batch, outer, seed=state.call_seed(0, b))
            stage.activation(0, state, b).copy_(captured.hidden)
            state.calls.append(captured.calls)

    def forward(self, op: Op, state: StepState) -> None:
        """Run one layer on all micro-batches; keep its outputs."""
        self.stage.heap.before("layers")
        stage, unit = self.stage, self.index[op.unit]
        weights = self._weights(op)
        for b in range(len(state.batches)):
            output = stage.model.forward_layer(
                unit - 1,
                weights,
                stage.activation(unit - 1, state, b),
                state.calls[b][unit - 1],
                seed=state.call_seed(unit, b),
            )
            stage.activation(unit, state, b).copy_(output)

    def head(self, op: Op, state: StepState) -> None:
        """Compute the loss and the head's gradient; set the window's rows apart."""
        self.stage.heap.before("head")
        stage, shape = self.stage, self.stage.shape
        out, words, hidden = shape.outer_out.length, stage.model.vocab_size, shape.hidden
        kind = accumulator_dtype(shape.head_accumulator_itemsize, stage.dtype)
        grads = stage.span(held(op.target), kind, 0, shape.head_length).zero_()
        table = self._table(op).view(words, hidden) if shape.tied else None
        table_grads = grads[out : out + words * hidden].view(words, hidden) if shape.tied else None
        for b, batch in enumerate(state.batches):
            result = stage.model.head(
                self._part(op, shape.outer_out.name, 0, out),
                table,
                stage.activation(len(shape.layers), state, b),
                batch.targets,
                target_count=state.targets,
                grads=grads[:out],
                table_grads=table_grads,
            )
            stage.activation(-1, state, b).copy_(result.grad_hidden)
            state.losses.append(result.loss)
            state.touched |= result.touched
        self._cut_rows(table_grads, state)

    def _cut_rows(self, table_grads: torch.Tensor | None, state: StepState) -> None:
        """Move the rows that the window touches into the outer accumulator, in fp32.

        The embedding's own gradient is added there before anything is rounded.
        """
        kept = self._row_grads(state)
        if table_grads is None:
            kept.zero_()
            return
        ids = _outer(state).token_ids
        kept.copy_(table_grads.index_select(0, ids))
        table_grads.index_fill_(0, ids, 0.0)

    def backward(self, op: Op, state: StepState) -> None:
        """Recompute one layer on all micro-batches and accumulate its gradient."""
        self.stage.heap.before("layers")
        stage, unit = self.stage, self.index[op.unit]
        weights = self._weights(op)
        kind = accumulator_dtype(stage.shape.layer_accumulator_itemsize, stage.dtype)
        grads = stage.span(held(op.target), kind, 0, len(weights)).zero_()
        for b in range(len(state.batches)):
            seat = stage.activation(-1, state, b)
            grad, touched = stage.model.backward_layer(
                unit - 1,
                weights,
                stage.activation(unit - 1, state, b),
                state.calls[b][unit - 1],
                seat,
                grads,
                seed=state.call_seed(unit, b),
            )
            seat.copy_(grad)
            state.touched |= touched

    def outer_backward(self, op: Op, state: StepState) -> None:
        """Add the gradients of what runs before the first layer."""
        self.stage.heap.before("layers")
        stage = self.stage
        rest = stage.behind_rows(held(op.target), torch.float32, stage.shape.rest_length).zero_()
        rows = self._row_grads(state)
        for b, batch in enumerate(state.batches):
            state.touched |= stage.model.backward_outer(
                batch,
                _outer(state),
                stage.activation(-1, state, b),
                seed=state.call_seed(0, b),
                row_grads=rows,
                rest_grads=rest,
            )

    def _row_grads(self, state: StepState) -> torch.Tensor:
        take = Take(
            arena=ArenaName.OUTER_ACCUMULATOR,
            index=0,
            nbytes=self.stage.shape.outer_accumulator_nbytes,
        )
        return self.stage.rows(take, torch.float32, len(state.token_ids))

    def _weights(self, op: Op) -> torch.Tensor:
        length = self.stage.shape.units[self.index[op.unit]].length
        return self._part(op, op.unit, 0, length)

    def _table(self, op: Op) -> torch.Tensor:
        """Return the tied table, which lies behind the last unit in the head's buffer."""
        shape = self.stage.shape
        length = self.stage.model.vocab_size * shape.hidden
        return self._part(op, shape.outer_in.name, shape.outer_out.length, length)

    def _part(self, op: Op, unit: str, start: int, length: int) -> torch.Tensor:
        """Return a unit's weights: in place where the device shares the host's memory."""
        stage = self.stage
        if stage.plan.step.in_place(unit):
            resident = stage.resident(unit, stage.shape.streamed)
            assert resident is not None  # in_place() says so
            return resident[:length]
        return stage.span(held(op.source), stage.dtype, start, start + length)


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the batch with its tokens on the device; its targets are looked at on the host."""
    mask = batch.attention_mask
    return replace(
        batch,
        input_ids=batch.input_ids.to(device, non_blocking=True),
        attention_mask=None if mask is None else mask.to(device, non_blocking=True),
    )


def extents(ids: list[int], row: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Group sorted rows into aligned byte ranges of at most ``most`` bytes.

    Yields (first, last, start, stop): rows ``ids[first:last]`` lie within ``[start, stop)``.
    Rows whose blocks touch share a range.
    """
    first, start, stop = 0, 0, 0
    for i, token in enumerate(ids):
        a = token * row // ALIGNMENT * ALIGNMENT
        b = round_up((token + 1) * row, ALIGNMENT)
        if i > first and (a > stop or b - start > most):
            yield first, i, start, stop
            first = i
        if i == first:
            start = a
        stop = b
    if ids:
        yield first, len(ids), start, stop


def _outer(state: StepState) -> OuterIn:
    if state.outer is None:
        raise RuntimeError("the schedule ran the front before its rows were copied")
    return state.outer


def accumulator_dtype(itemsize: int, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an accumulator whose elements have ``itemsize`` bytes."""
    return dtype if itemsize == dtype.itemsize else torch.float32
