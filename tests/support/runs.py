"""Small real runs: a random Llama, a JSONL file, and what a store holds afterwards."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint.schema import SCHEMA_FILE, Schema
from megatrain import run
from megatrain.config import RunConfig
from megatrain.metrics import MetricsLog
from megatrain.planner import Plan
from megatrain.train_state import TrainState
from megatrain.trainer import Row, Stop
from tests.support.hf_folders import make_llama
from tiering.store import open_reader

ROLES = ("master", "exp_avg", "exp_avg_sq")
TIMES = ("step_s", "read_bytes", "written_bytes", "committed")


class Quiet:
    """Keeps what a run reports; ``after`` is called with each row."""

    def __init__(self, after: Callable[[Row], None] | None = None) -> None:
        self.plan: Plan | None = None
        self.rows: list[Row] = []
        self.after = after

    def on_conversion(self, plan: object) -> None:
        pass

    def on_converted(self, done: int, total: int) -> None:
        pass

    def on_plan(self, plan: Plan, state: TrainState, slots: int) -> None:
        self.plan = plan

    def on_step(self, row: Row) -> None:
        self.rows.append(row)
        if self.after:
            self.after(row)


@functools.cache
def freeze_imports() -> None:
    """Keep the collector from walking through torch and transformers at every end of a run."""
    gc.collect()
    gc.freeze()


def tiny_llama(folder: Path, *, tie: bool = False, **changes: Any) -> Path:
    """Write a small random Llama in bf16."""
    make_llama(folder, tie=tie, **changes)
    freeze_imports()
    return folder


def token_rows(path: Path, count: int = 12, *, vocab: int = 96, seed: int = 1) -> Path:
    """Write samples of unequal lengths as token ids."""
    generator = np.random.default_rng(seed)
    with path.open("w") as file:
        for i in range(count):
            ids = generator.integers(3, vocab, 5 + (i * 7) % 40).tolist()
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    return path


def run_config(model: Path, data: Path, out: Path, **changes: Any) -> RunConfig:
    """Return a run of 3 steps in float32; ``section__key=value`` sets a key."""
    document: dict[str, Any] = {
        "model": str(model),
        "out": str(out),
        "data": {"train": str(data), "max_seq_len": 64},
        "train": {
            "steps": 3,
            "micro_batch": 2,
            "accumulate": 2,
            "lr": 1e-3,
            "schedule": "constant",
            "warmup_steps": 0,
            "dtype": "float32",
            "device": "cpu",
            "loss_chunk": 16,
        },
        "memory": {"ram": "64MiB", "workspace": "64MiB"},  # measuring it takes as long as a run
        "store": {"commit_every": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        document.setdefault(section, {})[name] = value
    return RunConfig.from_json(json.dumps(document))


def train(config: RunConfig, observer: Quiet | None = None) -> Quiet:
    """Run to the end in this process."""
    observer = observer or Quiet()
    run.train(config, observer, Stop())
    return observer


def read_state(store: Path) -> Mapping[str, np.ndarray]:
    """Return every trained tensor of the newest generation as ``name/role`` to raw bytes."""
    found = {}
    with open_reader(store) as reader:
        schema = Schema.decode(reader.schema_file(SCHEMA_FILE))
        for unit in schema.units:
            if not unit.trainable:
                continue
            for role in schema.roles(unit):
                record = schema.record(unit, role)
                data = bytearray(record.nbytes)
                reader.read(record.name, 0, memoryview(data))
                flat = np.frombuffer(data, np.uint8)
                for tensor in unit.tensors:
                    span = slice(tensor.offset * record.itemsize, tensor.end * record.itemsize)
                    found[f"{tensor.name}/{role}"] = flat[span]
    return found


def as_float(state: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    """Return an fp32 tensor of :func:`read_state`, flat."""
    return state[key].view(np.float32)


def differing(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[str]:
    """Return the keys whose bytes differ."""
    assert a.keys() == b.keys()
    return [key for key in a if not np.array_equal(a[key], b[key])]


def numbers(out: Path) -> list[dict[str, Any]]:
    """Return the metrics rows without what depends on time or place."""
    rows = MetricsLog(out / run.METRICS_FILE).read()
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
