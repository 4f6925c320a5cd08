"""A run killed at any moment goes on as if nothing had happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatrain import run
from megatrain.config import RunConfig
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

MODULES = [
    "deepspeed.ops.op_builder",
    "transformers.models.llama.modeling_llama",
    "megatrain.run",
    "tests.support.runs",
]


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes forked from a server that has imported everything and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context


def work(config: str, started: Any) -> None:
    """Begin the run, or go on with it; say when the first step is done."""
    configuration = RunConfig.from_json(config)
    observer = Quiet(lambda row: started.set())
    store = configuration.out / "store"
    begun = run.is_store(store) and (configuration.out / run.METRICS_FILE).exists()
    try:
        if begun and has_run(store):
            run.resume(configuration.out, (), observer, Stop())
        else:
            run.train(configuration, observer, Stop())
    finally:
        started.set()


def has_run(store: Path) -> bool:
    with open_reader(store) as reader:
        return bool(reader.manifest.train_state)


def alone(processes: Any, config: RunConfig) -> int:
    started = processes.Event()  # held: without its maker the child cannot open it
    process = processes.Process(target=work, args=(config.to_json(), started))
    process.start()
    process.join(120)
    return process.exitcode


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_llama(folder / "model", tie=True), token_rows(folder / "rows.jsonl", count=20)


KILLS = 8
MEMORY = {
    "disk": {"memory__resident": 1, "memory__gradients": "disk"},
    "half, committed every 3 steps": {"memory__resident": "100KiB", "store__commit_every": 3},
}


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY.keys())
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path, processes, inputs, memory):
    whole = run_config(*inputs, tmp_path / "whole", train__steps=12, **memory)
    assert alone(processes, whole) == 0
    expected, rows = read_state(tmp_path / "whole" / "store"), numbers(tmp_path / "whole")
    rng, kills = random.Random(7), 0
    config = run_config(*inputs, tmp_path / "killed", train__steps=12, **memory)
    while kills < KILLS:
        started = processes.Event()
        process = processes.Process(target=work, args=(config.to_json(), started))
        process.start()
        started.wait(60)
        process.join(rng.uniform(0.0, 0.15))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:  # ended before the kill: begin once more
            assert differing(expected, read_state(tmp_path / "killed" / "store")) == []
            assert numbers(tmp_path / "killed") == rows
            shutil.rmtree(tmp_path / "killed")
    assert alone(processes, config) == 0
    assert differing(expected, read_state(tmp_path / "killed" / "store")) == []
    assert numbers(tmp_path / "killed") == rows


def test_a_run_resumed_at_step_200_equals_the_uninterrupted_one(tmp_path, inputs):
    whole = run_config(*inputs, tmp_path / "whole", train__steps=203, store__commit_every=50)
    train(whole)
    halves = run_config(*inputs, tmp_path / "halves", train__steps=203, store__commit_every=50)
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


def test_masters_come_back_from_the_store_and_never_from_bf16(tmp_path, inputs):
    whole = run_config(*inputs, tmp_path / "whole", train__steps=6, train__dtype="bfloat16")
    train(whole)
    halves = run_config(*inputs, tmp_path / "halves", train__steps=6, train__dtype="bfloat16")
    stop = Stop()
    run.train(halves, Quiet(lambda row: row["step"] == 3 and stop.request()), stop)
    run.resume(tmp_path / "halves", (), Quiet(), Stop())
    assert (
        differing(
            read_state(tmp_path / "whole" / "store"), read_state(tmp_path / "halves" / "store")
        )
        == []
    )


@pytest.mark.parametrize("stops", [[21], [16], [7, 30]], ids=str)
def test_every_sample_is_seen_once_an_epoch_wherever_a_run_stops(tmp_path, inputs, stops):
    data = tmp_path / "rows.jsonl"
    rows = ({"input_ids": [3 + i % 90, 4, 5], "labels": [3 + i % 90, 4, 5]} for i in range(64))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run_config(inputs[0], data, tmp_path / "run", train__steps=48)
    left = list(stops)
    stop = Stop()

    def ask(row: Any) -> None:
        if left and row["step"] == left[0]:
            left.pop(0)
            stop.request()

    run.train(config, Quiet(ask), stop)
    while left:
        stop = Stop()
        run.resume(tmp_path / "run", (), Quiet(ask), stop)
    run.resume(tmp_path / "run", (), Quiet(), Stop())
    train(run_config(inputs[0], data, tmp_path / "whole", train__steps=48))
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    cursors = [row["cursor"] for row in numbers(tmp_path / "run")]
    assert cursors == [4 * (i + 1) for i in range(48)]


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


def test_sigterm_ends_the_run_after_its_commit(tmp_path, processes, inputs):
    config = run_config(*inputs, tmp_path / "run", train__steps=100_000)
    path = tmp_path / "run.yaml"
    path.write_text(config.to_json())
    ready = processes.Event()
    process = processes.Process(target=command, args=(["train", str(path)], ready))
    process.start()
    metrics = tmp_path / "run" / run.METRICS_FILE
    deadline = time.monotonic() + 120
    while not metrics.exists() and process.is_alive() and time.monotonic() < deadline:
        process.join(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 130
    last = numbers(tmp_path / "run")[-1]["step"]
    with open_reader(tmp_path / "run" / "store") as reader:
        assert reader.manifest.step == last


def command(arguments: list[str], ready: Any) -> None:
    from megatrain.cli import cli

    ready.set()
    cli(arguments)
