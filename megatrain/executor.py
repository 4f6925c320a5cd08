"""Runs one step's schedule on the lanes: each operation goes to the part that knows it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megatrain.data.batches import Window
from megatrain.gradients import Gradients
from megatrain.lanes import Lanes
from megatrain.ops import ArenaName, Kind, Op, ScheduleError, Take
from megatrain.stage import Stage, StepState
from megatrain.streaming import Streaming
from megatrain.update import Rule, Update

Handler = Callable[[Op, StepState], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step found out. ``odd`` are the parameters whose gradient was not finite."""

    loss: float
    grad_norm: float
    applied: bool
    odd: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A step whose updates are all written, about to be committed."""

    result: StepResult
    checksums: Mapping[str, np.ndarray]


class _Holds:
    """Who holds which slab in a step: none is ever lent twice at a time. Thread-safe.

    The list says when each is free, so nobody waits for one here.
    """

    def __init__(self) -> None:
        self._holders: dict[tuple[ArenaName, int], Op] = {}
        self._guard = threading.Lock()

    def take(self, op: Op) -> None:
        """Note what ``op`` takes.

        Raises:
            ScheduleError: It is in use: the schedule would overwrite it.
        """
        with self._guard:
            for take in op.takes:
                holder = self._holders.setdefault(_slab(take), op)
                if holder is not op:
                    raise ScheduleError(
                        f"the schedule has run out of {take.arena}: operation {op.id} ({op.kind} "
                        f"of {op.unit}) takes number {take.index}, which operation {holder.id} "
                        f"({holder.kind} of {holder.unit}) has taken and nobody has freed"
                    )

    def free(self, op: Op) -> None:
        """Note what ``op`` gives back."""
        with self._guard:
            for take in op.frees:
                self._holders.pop(_slab(take), None)


def _slab(take: Take) -> tuple[ArenaName, int]:
    return take.arena, take.index


class Executor:
    """Runs steps, one after another, on one stage.

    ``commit`` is called by the host lane once everything that the step writes is written.
    ``seconds`` is the time that the operations of each kind took in the last step.
    """

    def __init__(
        self,
        stage: Stage,
        update: Update,
        lanes: Lanes,
        *,
        max_norm: float | None,
        commit: Callable[[Applied], None],
    ) -> None:
        self.stage = stage
        self.update = update
        self.lanes = lanes
        self.seconds: dict[Kind, float] = defaultdict(float)
        self._commit = commit
        self._lists = {True: stage.plan.ops, False: stage.plan.without_commit()}
        self._handlers = self._table(Gradients(stage, max_norm=max_norm))

    def step(
        self, window: Window, rule: Rule, *, number: int, seed: int, commit: bool
    ) -> StepResult:
        """Run update ``number`` on ``window``; on return it is applied, and committed if asked.

        A step whose loss or gradient is not finite changes nothing.
        """
        state, holds = StepState.of(window, number=number, seed=seed), _Holds()
        self.seconds.clear()
        self.stage.pool.begin_step()
        self.update.begin(rule)

        def handle(op: Op) -> None:
            holds.take(op)
            began = time.perf_counter()
            self._handlers[op.kind](op, state)
            holds.free(op)
            self.stage.count(op, state)
            self.seconds[op.kind] += time.perf_counter() - began

        self.lanes.run(self._lists[commit], handle)
        if state.skip:
            self.update.forget()
        elif not commit:
            self.update.applied(state)
            self.stage.pool.applied(self.update.ledger.tables())
        return _result(state)

    def flush(self) -> Mapping[str, np.ndarray]:
        """Write what only RAM holds to the working slot; return the checksums of all records.

        They are as the last applied step left them.
        """
        for op in self.stage.plan.ops:
            if op.kind is Kind.FLUSH:
                self.update.flush_record(op.unit)
        return self.update.ledger.tables()

    def _table(self, gradients: Gradients) -> Mapping[Kind, Handler]:
        streaming, update = Streaming(self.stage), self.update
        return {
            Kind.READ_ROWS: streaming.read_rows,
            Kind.COPY_ROWS: streaming.copy_rows,
            Kind.READ_WEIGHTS: streaming.read_weights,
            Kind.COPY_WEIGHTS: streaming.copy_weights,
            Kind.CAPTURE: streaming.capture,
            Kind.FORWARD: streaming.forward,
            Kind.HEAD: streaming.head,
            Kind.BACKWARD: streaming.backward,
            Kind.OUTER_BACKWARD: streaming.outer_backward,
            Kind.COPY_GRADS: gradients.copy_grads,
            Kind.COPY_OUTER_GRADS: gradients.copy_outer_grads,
            Kind.SUM_SQUARES: gradients.sum_squares,
            Kind.WRITE_GRADS: gradients.write_grads,
            Kind.NORM: gradients.norm,
            Kind.READ_STATE: update.read_state,
            Kind.READ_GRADS: update.read_grads,
            Kind.UPDATE: update.update,
            Kind.WRITE_STATE: update.write_state,
            Kind.FLUSH: update.flush,
            Kind.COMMIT: self._finish,
        }

    def _finish(self, op: Op, state: StepState) -> None:
        if not state.skip:
            self.update.applied(state)  # the counts belong to the generation
            self._commit(Applied(result=_result(state), checksums=self.update.ledger.tables()))


def _result(state: StepState) -> StepResult:
    return StepResult(
        loss=state.loss,
        grad_norm=state.grad_norm,
        applied=not state.skip,
        odd=tuple(dict.fromkeys(state.odd)),
    )
