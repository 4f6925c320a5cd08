"""The order of the samples is that of an uninterrupted run, wherever a run was stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatrain import run
from megatrain.config import RunConfig
from megatrain.data.batches import Batches
from megatrain.trainer import Stop
from tests.support.runs import Quiet, numbers, run_config, tiny_llama

ROWS = 64
EPOCHS = 3
KINDS = {"mid_epoch_21": [21], "boundary_16": [16], "twice_7_30": [7, 30]}


@contextmanager
def consumed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Keep the numbers of the samples in the order in which windows take them."""
    ids: list[int] = []
    window = Batches.window

    def noted(self: Batches, cursor: int) -> Any:
        found = window(self, cursor)
        ids.extend(found.indices)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "window", noted)
        yield ids


@pytest.fixture(scope="module", name="inputs")
def _inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("order")
    rows = ([3 + i, 4, 5, 6 + i % 7] for i in range(ROWS))
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"input_ids": r, "labels": r}) + "\n" for r in rows))
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    return tiny_llama(folder / "model", **small), data


def interrupted(config: RunConfig, stops: Sequence[int]) -> None:
    left = list(stops)
    begin = True
    while begin or left:
        stop = Stop()

        def ask(row: Any, stop: Stop = stop) -> None:
            if left and row["step"] == left[0]:
                left.pop(0)
                stop.request()

        if begin:
            run.train(config, Quiet(ask), stop)
        else:
            run.resume(config.out, (), Quiet(ask), stop)
        begin = False
    run.resume(config.out, (), Quiet(), Stop())


@pytest.fixture(scope="module", name="reference")
def _reference(
    inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the samples and the rows of a run that nobody interrupted."""
    config = run_config(*inputs, tmp_path_factory.mktemp("whole") / "run", train__steps=48)
    with consumed(pytest.MonkeyPatch()) as ids:
        run.train(config, Quiet(), Stop())
    return ids, numbers(config.out)


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_seen_once_an_epoch_in_the_order_of_an_uninterrupted_run(
    inputs: tuple[Path, Path],
    reference: tuple[list[int], list[dict[str, Any]]],
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = run_config(*inputs, tmp_path / "run", train__steps=48, store__commit_every=5)
    with consumed(monkeypatch) as ids:
        interrupted(config, KINDS[kind])
    epochs = {tuple(ids[i : i + ROWS]) for i in range(0, len(ids), ROWS)}
    rows = numbers(config.out)
    assert (ids, rows) == reference
    assert [row["cursor"] for row in rows] == [4 * (i + 1) for i in range(48)]
    assert set(Counter(ids).values()) == {EPOCHS}
    assert len(epochs) == EPOCHS
