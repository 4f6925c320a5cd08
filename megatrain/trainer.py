"""The loop of a run: windows in, steps through the executor, commits and metrics out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatrain.cadence import cadence
from megatrain.config import RunConfig
from megatrain.data.batches import Batches, Tally, Window
from megatrain.engine import Engine
from megatrain.executor import Applied, StepResult
from megatrain.lr_schedule import lr
from megatrain.metrics import MetricsLog
from megatrain.ops import Kind
from megatrain.optimizer import AdamStep
from megatrain.stage import Traffic
from megatrain.train_state import TrainState
from megatrain.update import Rule
from tiering.errors import MegatrainError, RefusedError
from tiering.records import Tier

log = logging.getLogger(__name__)
Row = Mapping[str, Any]


class Observer(Protocol):
    """Whoever watches a run."""

    def on_step(self, row: Row) -> None:
        """Take the metrics of a step that is applied."""


class Stop:
    """Asks a run to end after its next commit; safe to set from a signal handler.

    ``leave`` is what to do when a run has failed and cannot end, because a lane is stuck; as it
    is, the run waits for the lane.
    """

    def __init__(self) -> None:
        self.requested = False
        self.leave: Callable[[BaseException], None] = lambda error: None

    def request(self) -> None:
        """End the run after the step in progress, committed."""
        self.requested = True


@dataclass(slots=True, kw_only=True)
class _Turn:
    """The step in progress, as the commit needs to see it."""

    window: Window
    rate: float
    commit: bool


class Trainer:
    """Makes the steps of one run until its end, an error or a request to stop."""

    def __init__(
        self,
        state: TrainState,
        batches: Batches,
        metrics: MetricsLog,
        *,
        observer: Observer,
        stop: Stop,
    ) -> None:
        self.state = state
        self.batches = batches
        self.metrics = metrics
        self.observer = observer
        self.stop = stop
        self.committed = state.step
        self._applied = state
        chosen = state.config.store.commit_every
        self.cadence = 1 if chosen == "auto" else chosen
        self._committed_at = time.perf_counter()
        self._engine: Engine | None = None
        self._turn: _Turn | None = None
        self._since = time.perf_counter()
        self._step_s = 0.0
        self._before: dict[Tier, Traffic] = {}
        self._tally = Tally()
        self._in_a_row = 0

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.state.config

    @property
    def engine(self) -> Engine:
        """The running parts, once :meth:`run` has begun."""
        if self._engine is None:
            raise RuntimeError("the trainer was used before it ran")
        return self._engine

    def run(self, engine: Engine) -> None:
        """Make steps; on return the last one is committed."""
        self._engine = engine
        self._before = self._traffic()
        self._since = time.perf_counter()
        epoch = -1
        while not self.state.finished and not self._may_stop():
            window = self._window()
            if window.epoch != epoch:
                self._end_epoch(epoch)
                epoch = window.epoch
            self._tally.add(window)
            self._step(window)
        self._end_epoch(epoch)

    def _window(self) -> Window:
        try:
            return self.batches.window(self.state.cursor)
        except MegatrainError:
            self._commit_applied()  # the data is at fault: the steps before are good
            raise

    def _end_epoch(self, epoch: int) -> None:
        self._tally.report(epoch)
        self._tally = Tally()

    def detach(self) -> None:
        """Let go of the engine, whose memory is about to be given back."""
        self._engine = None

    def _may_stop(self) -> bool:
        return self.stop.requested and self.committed == self.state.step

    # -- one step ------------------------------------------------------------------------------

    def _step(self, window: Window) -> None:
        if not window.targets:
            self._skip(window, "no sample has a label to learn from")
            return
        number = self.state.step + 1
        turn = _Turn(window=window, rate=self._rate(), commit=self._commits(number))
        self._turn = turn
        result = self.engine.executor.step(
            window,
            self._rule(turn.rate),
            number=number,
            seed=self.config.train.seed,
            commit=turn.commit,
        )
        if not result.applied:
            self._skip(window, f"loss {result.loss}, gradient of {_named(result)}")
            return
        self._in_a_row = 0
        if not turn.commit:
            self._advance(window)
            self._report(result, committed=False)
        self._choose_cadence()

    def commit(self, applied: Applied) -> None:
        """Make the step's records the next generation; called by the executor's host lane."""
        assert self._turn is not None  # a step is in progress
        self._advance(self._turn.window)
        # the row first: what is committed is in the metrics; rows of lost steps are dropped
        self._report(applied.result, committed=True)
        self.engine.stage.pool.commit(
            step=self.state.step,
            train_state=self.state.encode(),
            checksums=applied.checksums,
            retain=self.config.store.retain,
        )
        self.committed = self.state.step
        self._committed_at = time.perf_counter()

    def _advance(self, window: Window) -> None:
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            cursor=window.cursor,
            counts=dict(self.engine.update.counts),
        )
        self._applied = self.state

    def _commit_applied(self) -> None:
        """Commit the steps that are good and not committed yet, before the run gives up.

        The generation knows nothing of what came after them, as if each had been committed.
        """
        if self.committed == self._applied.step:
            return
        self.metrics.sync()
        self.engine.stage.pool.commit(
            step=self._applied.step,
            train_state=self._applied.encode(),
            checksums=self.engine.executor.flush(),
            retain=self.config.store.retain,
        )
        self.committed = self._applied.step

    def _skip(self, window: Window, reason: str) -> None:
        self._in_a_row += 1
        self.state = replace(self.state, cursor=window.cursor, skipped=self.state.skipped + 1)
        log.warning("skipped a step after step %d: %s", self.state.step, reason)
        if self._in_a_row > self.config.train.max_skipped:
            self._commit_applied()
            raise RefusedError(
                f"{self._in_a_row} steps in a row changed nothing, the last one because of "
                f"{reason}; the store is at step {self.committed}"
            )

    def _commits(self, number: int) -> bool:
        if number >= self.config.train.steps or self.stop.requested:
            return True
        return number - self.committed >= self.cadence or self._too_much_to_lose()

    def _too_much_to_lose(self) -> bool:
        """Return whether a kill after the coming step would cost more than was allowed."""
        if self.config.store.commit_every != "auto":
            return False
        lost_s = time.perf_counter() - self._committed_at + self._step_s
        return lost_s > self.config.store.max_lost

    def _choose_cadence(self) -> None:
        if self.config.store.commit_every != "auto":
            return
        seconds = self.engine.executor.seconds
        if self.cadence == 1 and seconds[Kind.COMMIT]:
            self.cadence = cadence(
                resident=seconds[Kind.FLUSH] > 0,
                flush_s=seconds[Kind.FLUSH],
                step_s=self._step_s,
                max_lost_s=self.config.store.max_lost,
            )

    # -- numbers -------------------------------------------------------------------------------

    def _rate(self) -> float:
        train = self.config.train
        return lr(
            self.state.step,
            base=train.lr,
            schedule=train.schedule,
            warmup_steps=train.warmup_steps,
            steps=train.steps,
        )

    def _rule(self, rate: float) -> Rule:
        train = self.config.train

        def rule(name: str, t: int) -> AdamStep:
            decay = train.weight_decay if train.decays(name) else 0.0
            return AdamStep.at(t, lr=rate, betas=train.betas, eps=train.eps, weight_decay=decay)

        return rule

    def _report(self, result: StepResult, *, committed: bool) -> None:
        assert self._turn is not None  # a step is in progress
        window, now, traffic = self._turn.window, time.perf_counter(), self._traffic()
        row = {
            "step": self.state.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": self._turn.rate,
            "tokens": window.tokens,
            "targets": window.targets,
            "samples": window.samples,
            "epoch": window.epoch,
            "cursor": window.cursor,
            "skipped": self.state.skipped,
            "committed": committed,
            "step_s": round(now - self._since, 6),
            "read_bytes": {str(t): n.read - self._before[t].read for t, n in traffic.items()},
            "written_bytes": {
                str(t): n.written - self._before[t].written for t, n in traffic.items()
            },
        }
        self._step_s, self._since, self._before = now - self._since, now, traffic
        self.metrics.append(row, durable=committed)
        self.observer.on_step(row)

    def _traffic(self) -> dict[Tier, Traffic]:
        stage = self.engine.stage
        moved = {
            tier: Traffic(read=found.read, written=found.written)
            for tier, found in stage.resident_traffic.items()
        }
        for tier in (Tier.NVME, Tier.ZARR):
            drives = stage.pool.traffic[tier]
            moved[tier] = Traffic(read=drives.read_bytes, written=drives.written_bytes)
        if stage.scratch is not None:
            moved[Tier.NVME].add(read=stage.scratch.read_bytes, written=stage.scratch.written_bytes)
        return moved


def _named(result: StepResult) -> str:
    names = [*result.odd[:3], *([f"{len(result.odd) - 3} more"] if len(result.odd) > 3 else [])]
    return ", ".join(names) or "no parameter is odd"
