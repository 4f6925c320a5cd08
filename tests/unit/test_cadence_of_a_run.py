from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from megatrain import executor, trainer
from tests.support.runs import run_config, tiny_llama, token_rows, train


def test_the_cost_of_a_flush_is_that_of_one_step_however_long_the_run(tmp_path, monkeypatch):
    clock, seen = threading.local(), []

    def a_second_each_operation() -> float:
        clock.now = getattr(clock, "now", 0.0) + 1.0
        return clock.now

    def note(*, flush_s: float, **rest: Any) -> int:
        seen.append(flush_s)
        return 1

    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=a_second_each_operation))
    monkeypatch.setattr(trainer, "cadence", note)
    config = run_config(
        tiny_llama(tmp_path / "m"),
        token_rows(tmp_path / "rows.jsonl"),
        tmp_path / "run",
        train__steps=4,
        store__commit_every="auto",
    )
    train(config)
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert seen[0] > 0
