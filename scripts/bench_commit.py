"""What committing every step costs when all state is on disk, and what the checksums cost.

One run in which two steps do not commit, two do, and two more do of which the first computes no
checksums; and so on. A commit costs its own step (sync and manifest), and it may cost the step
after it: that one reads the committed slot and writes the other, where one after a step without
a commit updates its slot in place. So a step with a commit after another is what a run is made
of that commits each step, and one without after another without is what a run is made of that
never does: these are compared, those next to each other. Each is also timed from within.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatrain import run
from megatrain.config import RunConfig
from megatrain.data.batches import Window
from megatrain.metrics import MetricsLog
from megatrain.ops import Kind
from megatrain.trainer import Row, Stop, Trainer
from tiering import checksum, fsops, writer
from tiering.generations import publish
from tiering.pool import Pool

WARM_UP = 2  # steps: the first is checked as it is read, and each slot is written once
COMPUTATION = (Kind.CAPTURE, Kind.FORWARD, Kind.HEAD, Kind.BACKWARD, Kind.OUTER_BACKWARD)
PARTS = {  # of a commit, in the order in which they happen, and of what it takes to begin anew
    "row": "the row of the metrics, durable",
    "sync": "the sync of the drive",
    "publish": "manifest and root, durable",
    "commit": "the commit, with these",
    "begin": "choice of the next slot",
}
BEGAN = time.perf_counter()
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step is to do."""

    commit: bool
    crc: bool = True


@dataclass(slots=True)
class Step:
    """What a step took, from its first operation until the next step may begin.

    Attributes:
        computing_s: Seconds of forward and backward.
        parts: Seconds by what was done.
        crc_s: Seconds of the checksums, on the clocks of the threads that computed them.
        counted: Bytes of records and gradients that were written, as the run counts them.
        documents: Bytes of manifest, table of checksums and root.
        by_process: Bytes that this process had the kernel write.
        by_device: Bytes that the drive was given to write, by anybody.
    """

    turn: Turn
    after_commit: bool
    step_s: float = 0.0
    computing_s: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    crc_s: float = 0.0
    crc_nbytes: int = 0
    counted: int = 0
    documents: int = 0
    by_process: int = 0
    by_device: int = 0

    @property
    def rest_s(self) -> float:
        """Seconds in which nothing was computed: the update, what waits for drives, the commit."""
        return self.step_s - self.computing_s


PLAIN, COMMIT, NO_CRC = Turn(commit=False), Turn(commit=True), Turn(commit=True, crc=False)
TURNS = (PLAIN, PLAIN, COMMIT, COMMIT, NO_CRC, COMMIT)
ENDS = (3, 5)  # turns after which what was measured is balanced


class Clocks:
    """Adds up what functions take in the step in progress."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self._guard = threading.Lock()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, its seconds added to the part ``name``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if self.step is not None:
                    passed = self.step.parts.get(name, 0.0) + time.perf_counter() - began
                    self.step.parts[name] = passed

        return call

    def counted(self, function: Callable[[Path, bytes], None]) -> Callable[[Path, bytes], None]:
        """Return what writes a small file, its bytes added up."""

        def write_file(path: Path, data: bytes) -> None:
            function(path, data)
            if self.step is not None:
                self.step.documents += len(data)

        return write_file

    def checksum(self, function: Callable[..., int]) -> Callable[..., int]:
        """Return the crc32c with its time counted; it is a constant in steps without one."""

        def crc32c(data: checksum.Buffer, value: int = 0) -> int:
            step = self.step
            if step is None:
                return function(data, value)
            if not step.turn.crc:
                return 0
            began = time.thread_time_ns()
            found = function(data, value)
            passed = time.thread_time_ns() - began
            with self._guard:
                step.crc_s += passed / 1e9
                step.crc_nbytes += len(data)
            return found

        return crc32c


CLOCKS = Clocks()


class InTurns(Trainer):
    """Makes each step as its turn says, until the time is up."""

    device: Path
    deadline: float
    done: list[Step]

    def _commits(self, number: int) -> bool:
        return _turn(number - 1).commit

    def _step(self, window: Window) -> None:
        number = self.state.step
        step = Step(_turn(number), after_commit=_turn(number - 1).commit)
        process, device, counted = _written_by_process(), _written_by(self.device), self._counted()
        CLOCKS.step = step
        began = time.perf_counter()
        super()._step(window)
        step.step_s = time.perf_counter() - began
        CLOCKS.step = None
        step.computing_s = sum(self.engine.executor.seconds[kind] for kind in COMPUTATION)
        step.counted = self._counted() - counted
        step.by_process = _written_by_process() - process
        step.by_device = _written_by(self.device) - device
        self.done.append(step)
        print(_line(number + 1, step), flush=True)
        self._end_in_time()

    def _end_in_time(self) -> None:
        """Stop where another half of the turns would take too long."""
        steps = self.done[WARM_UP:]
        if not steps or (len(steps) - 1) % len(TURNS) not in ENDS:
            return
        one_s = statistics.mean(step.step_s for step in steps)
        if time.perf_counter() + 4 * one_s > self.deadline:
            self.stop.request()

    def _counted(self) -> int:
        return sum(traffic.written for traffic in self._traffic().values())


def _turn(step: int) -> Turn:
    """Return what the step after ``step`` others is to do."""
    return COMMIT if step < WARM_UP else TURNS[(step - WARM_UP) % len(TURNS)]


def _line(number: int, step: Step) -> str:
    parts = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in step.parts.items())
    crc = f"crc {1000 * step.crc_s:.0f} ms" if step.turn.crc else "no crc"
    seconds = f"{step.step_s:.2f} s ({step.rest_s:.2f} s beside the computation)"
    return f"step {number}: {seconds}, {crc}; {parts}"


def _written_by_process() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


def _written_by(device: Path) -> int:
    """Return the bytes that the whole machine has written to a block device."""
    return 512 * int((device / "stat").read_text().split()[6]) if device.exists() else 0


class Quiet:
    """Watches a run and says nothing but its plan."""

    def on_conversion(self, plan: object) -> None:
        pass

    def on_converted(self, done: int, total: int) -> None:
        pass

    def on_plan(self, plan: Any, state: object, slots: int) -> None:
        self.parameters = plan.step.shape.parameters
        tiers = ", ".join(f"{tier} {nbytes / MIB:.0f} MiB" for tier, nbytes in plan.tiers.items())
        print(f"state: {tiers}; {slots} slots", flush=True)

    def on_step(self, row: Row) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--ram", default="256MiB", help="memory.ram; no record is kept in it")
    parser.add_argument("--minutes", type=float, default=4.7, help="how long it may take")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=".")).resolve()
    try:
        steps, parameters = measure(args, folder)
    finally:
        shutil.rmtree(folder)
    print()
    print(report(steps, parameters))


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Step], int]:
    """Return the steps of a run in turns, and its parameters."""
    InTurns.deadline = BEGAN + 60 * args.minutes
    InTurns.device = _device_of(folder)
    InTurns.done = []
    watcher = Quiet()
    with patched():
        run.train(configuration(args, folder), watcher, Stop())
    return InTurns.done, watcher.parameters


def configuration(args: argparse.Namespace, folder: Path) -> RunConfig:
    """Return a run on ``args.batch`` samples that are the same in each step."""
    words = json.loads((args.model / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, words, (args.batch, args.length), generator=generator).tolist()
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    document = {
        "model": str(args.model),
        "out": str(folder / "run"),
        "data": {"train": str(data), "max_seq_len": args.length, "shuffle": False},
        "train": {
            "steps": 1_000_000,
            "micro_batch": args.batch,
            "accumulate": 1,
            "lr": 1e-5,
            "schedule": "constant",
            "warmup_steps": 0,
            "dtype": args.dtype,
        },
        "memory": {"ram": args.ram, "resident": 0},
        "store": {"commit_every": 1},
    }
    return RunConfig.from_json(json.dumps(document))


def _device_of(folder: Path) -> Path:
    number = folder.stat().st_dev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")


@contextmanager
def patched() -> Iterator[None]:
    """Put the clocks, and the turns, around the real functions."""
    replaced: list[tuple[Any, str, Any]] = [
        (run, "Trainer", InTurns),
        (Trainer, "commit", CLOCKS.timed("commit", Trainer.commit)),
        (MetricsLog, "append", CLOCKS.timed("row", MetricsLog.append)),
        (Pool, "begin_step", CLOCKS.timed("begin", Pool.begin_step)),
        (fsops, "write_file", CLOCKS.counted(fsops.write_file)),
        (fsops, "sync_drive", CLOCKS.timed("sync", fsops.sync_drive)),
        (writer, "publish", CLOCKS.timed("publish", publish)),
        (checksum, "crc32c", CLOCKS.checksum(checksum.crc32c)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, new in replaced:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two steps, one soon after the other, of which one does more."""

    less: Step
    more: Step

    @property
    def ratio(self) -> float:
        """What doing more costs, as a ratio of whole steps."""
        return self.more.step_s / self.less.step_s

    @property
    def share(self) -> float:
        """What doing more costs beside the computation, as a share of the step."""
        return (self.more.rest_s - self.less.rest_s) / self.less.step_s


def neighbours(steps: Sequence[Step], more: Callable[[Step], bool]) -> list[Pair]:
    """Return each two that follow each other and differ in whether they do ``more``."""
    found = []
    for one, other in itertools.pairwise(steps):
        if more(one) != more(other):
            found.append(Pair(other, one) if more(one) else Pair(one, other))
    return found


def report(steps: Sequence[Step], parameters: int) -> str:
    """Return what was measured as a table."""
    steady = steps[WARM_UP:]
    settled = [step for step in steady if step.turn.commit == step.after_commit]
    with_crc = [step for step in settled if step.turn.crc]
    without = [step for step in settled if not step.turn.commit]
    committed = [step for step in with_crc if step.turn.commit]
    uncommitted = [step for step in steady if not step.turn.commit]
    rows = [
        ("step, none commits", _spread([s.step_s for s in without], "{:.2f} s")),
        ("step, each commits", _spread([s.step_s for s in committed], "{:.2f} s")),
        *_costs("commit or none", neighbours(with_crc, lambda step: step.turn.commit)),
        *_costs(
            "commit or none in the step before",
            neighbours(uncommitted, lambda step: step.after_commit),
        ),
        *_shares(committed),
        *_written(without, committed, parameters),
        *_costs(
            "crc or none", neighbours([s for s in settled if s.turn.commit], lambda s: s.turn.crc)
        ),
    ]
    lines = ["| | median | range |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {values} |" for name, values in rows)])


Line = tuple[str, str]


def _spread(values: Sequence[float], form: str) -> str:
    """Return the median and the range as two cells."""
    if not values:
        return "not measured | "
    low, high = form.format(min(values)), form.format(max(values))
    return f"{form.format(statistics.median(values))} | {low} to {high}"


def _costs(what: str, pairs: Sequence[Pair]) -> Iterator[Line]:
    yield f"{what}: whole steps", _spread([pair.ratio for pair in pairs], "{:.3f}")
    shares = [100 * pair.share for pair in pairs]
    yield f"{what}: beside the computation, of a step", _spread(shares, "{:+.2f} %")


def _shares(committed: Sequence[Step]) -> Iterator[Line]:
    """What of a step is the commit, and what are the checksums, each by its own clock."""
    for part, name in PARTS.items():
        times = [1000 * step.parts[part] for step in committed]
        yield name, _spread(times, "{:.1f} ms")
    shares = [
        100 * (step.parts["commit"] + step.parts["begin"]) / step.step_s for step in committed
    ]
    yield "all of this, of a step", _spread(shares, "{:.2f} %")
    yield "crc, of a step", _spread([100 * s.crc_s / s.step_s for s in committed], "{:.2f} %")
    speeds = [step.crc_nbytes / step.crc_s / 1e9 for step in committed]
    yield "crc, speed of one thread", _spread(speeds, "{:.1f} GB/s")


def _written(without: Sequence[Step], committed: Sequence[Step], parameters: int) -> Iterator[Line]:
    """Bytes of the state, and all others: of the commit, of the file system, of the metrics."""
    documents = [step.documents / 1024 for step in committed]
    yield "manifest, checksums and root", _spread(documents, "{:.1f} KiB")
    for name, steps in (("none commits", without), ("each commits", committed)):
        counted = [step.counted / parameters for step in steps]
        process = [(step.by_process - step.counted) / 1024 for step in steps]
        device = [(step.by_device - step.counted) / 1024 for step in steps]
        yield f"{name}: state and gradients, a parameter", _spread(counted, "{:.4f} B")
        yield f"{name}: beside them, by this process", _spread(process, "{:.0f} KiB")
        yield f"{name}: beside them, by the whole machine", _spread(device, "{:.0f} KiB")


if __name__ == "__main__":
    main()
