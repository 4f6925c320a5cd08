"""A run killed at any moment goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatrain import run
from megatrain.trainer import Stop
from tests.support.runs import (
    Quiet,
    differing,
    numbers,
    read_state,
    run_config,
    tiny_llama,
    token_rows,
    train,
)
from tiering.errors import RefusedError
from tiering.store import open_reader


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    model = tiny_llama(folder / "model", tie=True, num_hidden_layers=1)
    return model, token_rows(folder / "rows.jsonl", count=20)


def test_a_run_resumed_at_step_200_equals_the_uninterrupted_one(tmp_path, inputs):
    settings = {"train__steps": 203, "train__accumulate": 1, "store__commit_every": 50}
    train(run_config(*inputs, tmp_path / "whole", **settings))
    halves = run_config(*inputs, tmp_path / "halves", **settings)
    stop = Stop()

    def at_200(row: Any) -> None:
        if row["step"] == 200:
            stop.request()

    run.train(halves, Quiet(at_200), stop)
    assert numbers(tmp_path / "halves")[-1]["step"] == 200
    outcome = run.resume(tmp_path / "halves", (), Quiet(), Stop())
    assert outcome.finished
    assert (
        differing(
            read_state(tmp_path / "whole" / "store"), read_state(tmp_path / "halves" / "store")
        )
        == []
    )
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "halves")


def test_a_run_killed_before_its_first_commit_is_begun_again(tmp_path, inputs):
    class KilledError(Exception):
        pass

    def kill(row: Any) -> None:
        raise KilledError  # the row is written, the commit is not

    config = run_config(*inputs, tmp_path / "run")
    with pytest.raises(KilledError):
        train(config, Quiet(kill))
    with pytest.raises(RefusedError, match="start one with megatrain train"):
        run.resume(tmp_path / "run", (), Quiet(), Stop())
    train(config)
    assert [row["step"] for row in numbers(tmp_path / "run")] == [1, 2, 3]


def test_sigterm_ends_the_run_after_its_commit(tmp_path, children, inputs):
    config = run_config(*inputs, tmp_path / "run", train__steps=100_000)
    path = tmp_path / "run.yaml"
    path.write_text(config.to_json())
    metrics = tmp_path / "run" / run.METRICS_FILE
    ended = children.run(["tests.crash.test_resume:train_until_sigterm", path, metrics])
    assert ended.code == 130
    last = numbers(tmp_path / "run")[-1]["step"]
    with open_reader(tmp_path / "run" / "store") as reader:
        assert reader.manifest.step == last


def train_until_sigterm(config: str, metrics: str) -> None:
    """Run the command, and signal this process after its first step."""
    from megatrain.cli import cli

    def send() -> None:
        while not os.path.exists(metrics):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    cli(["train", config])
