"""A run as a person watches it: the plan, a bar, and the numbers beside it. All on stderr."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from tqdm import tqdm

from checkpoint.plan import Plan as ConversionPlan
from megatrain.planner import Plan
from megatrain.report import plan_report
from megatrain.train_state import TrainState
from megatrain.trainer import Row


class Terminal:
    """Shows a run on stderr; ``stopping`` is what a request to stop means at this moment."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.stopping = "stopping"
        self._bar: tqdm[Any] | None = None

    def on_conversion(self, plan: ConversionPlan) -> None:
        """Say what is taken, left and renamed; start the conversion's bar."""
        self.stopping = "stopping; removing the unfinished store"
        for note in plan.notes:
            self.console.print(f"note: {note}", markup=False)
        self._bar = tqdm(desc="convert", unit="B", unit_scale=True, unit_divisor=1024)

    def on_converted(self, done: int, total: int) -> None:
        """Advance the conversion's bar."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)

    def on_plan(self, plan: Plan, state: TrainState, slots: int) -> None:
        """Print the plan, then start the bar."""
        self.close()
        self.stopping = "stopping after the commit of this step"
        self.console.print(plan_report(plan, slots=slots))
        verb = "going on after" if state.step else "from"
        self.console.print(f"{verb} step {state.step} of {state.config.train.steps}")
        self._bar = tqdm(
            total=state.config.train.steps, initial=state.step, desc="train", unit="step"
        )

    def on_step(self, row: Row) -> None:
        """Advance the bar."""
        if self._bar is None:
            return
        seconds = max(row["step_s"], 1e-9)
        self._bar.set_postfix_str(
            f"loss {row['loss']:.4f}, {row['tokens'] / seconds:.0f} tok/s, "
            f"read {row['read_bytes']['nvme'] / seconds / 1e9:.2f} GB/s, "
            f"written {row['written_bytes']['nvme'] / seconds / 1e9:.2f} GB/s",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        """Leave the terminal as a finished line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
