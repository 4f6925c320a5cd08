"""The learning rate after a resume, and resuming with other settings than the run began with."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatrain import run
from megatrain.trainer import Stop
from tests.support.runs import Quiet, numbers, run_config, tiny_llama, token_rows
from tiering.errors import RefusedError

LR = 1e-3


def wanted() -> list[float]:
    """The rate of each of 12 steps: linear warm-up of 4, linear decay to 0 at 12."""
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([p], lr=LR)
    factor = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: k / 4 if k < 4 else max(0.0, (12 - k) / 8)
    )
    used = []
    for _ in range(12):
        used.append(optimizer.param_groups[0]["lr"])
        p.grad = torch.ones(1)
        optimizer.step()
        factor.step()
    return used


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with every generation kept, stopped after the last but one."""
    folder = tmp_path_factory.mktemp("rates")
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    config = run_config(
        tiny_llama(folder / "model", **small),
        token_rows(folder / "rows.jsonl"),
        folder / "run",
        train__steps=12,
        train__schedule="linear",
        train__warmup_steps=4,
        train__micro_batch=1,
        train__accumulate=4,
        store__retain=11,
    )
    stop = Stop()
    run.train(config, Quiet(lambda row: row["step"] == 11 and stop.request()), stop)
    return folder


@pytest.fixture(name="place")
def _place(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder / "run", tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def rates(place: Path) -> list[float]:
    return [row["lr"] for row in numbers(place)]


def resume(place: Path, after: int, *sets: str, allow: bool = False) -> None:
    """Go on after step ``after``; generation 1 is the conversion."""
    outcome = run.resume(place, sets, Quiet(), Stop(), allow_changes=allow, generation=after + 1)
    assert outcome.finished


@pytest.mark.parametrize("after", [1, 4, 8, 11])
def test_the_rates_are_the_same_list_wherever_a_run_goes_on(place: Path, after: int) -> None:
    resume(place, after)
    np.testing.assert_allclose(rates(place), wanted(), rtol=1e-12)


def test_the_same_global_batch_may_be_split_another_way(place: Path) -> None:
    resume(place, 9, "train.micro_batch=2", "train.accumulate=2", "memory.ram=32MiB")
    np.testing.assert_allclose(rates(place), wanted(), rtol=1e-12)
    assert [row["cursor"] for row in numbers(place)] == [4 * (i + 1) for i in range(12)]


CHANGES = {
    "longer": ("train.steps=14", "train.steps: 12 -> 14"),
    "new_lr": ("train.lr=0.5", "train.lr: 0.001 -> 0.5"),
    "new_seed": ("train.seed=3", "train.seed: 0 -> 3"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_other_settings_are_refused_with_old_and_new_value(place: Path, kind: str) -> None:
    change, named = CHANGES[kind]
    with pytest.raises(RefusedError, match="--allow-changes") as refusal:
        resume(place, 9, change)
    assert named in str(refusal.value)
    assert len(rates(place)) == 11, "a refused resume dropped rows"


def test_an_allowed_change_applies_from_the_next_step_and_the_rates_around_it_are_told(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resume(place, 8, "train.steps=14", "train.lr=2e-3", allow=True)
    later = [2 * LR * (14 - k) / 10 for k in range(8, 14)]
    np.testing.assert_allclose(rates(place), [*wanted()[:8], *later], rtol=1e-12)
    told = f"the learning rate was {wanted()[7]:.6g} in step 8 and is {later[0]:.6g} in step 9"
    assert told in caplog.text


def test_a_shorter_horizon_never_lets_the_rate_rise_again(place: Path) -> None:
    resume(place, 9, "train.steps=10", "train.schedule=cosine", allow=True)
    used = rates(place)
    assert len(used) == 10
    assert used[9] <= used[8]


def test_changed_data_is_refused_unless_changes_are_allowed(
    place: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = token_rows(tmp_path / "other.jsonl", count=13)
    change = f"data.train={other}"
    with pytest.raises(RefusedError, match=r"data\.train: .*rows\.jsonl.* -> .*other\.jsonl"):
        resume(place, 10, change)
    resume(place, 10, change, allow=True)
    assert "other.jsonl" in caplog.text


def test_data_that_changed_in_its_place_is_refused_unless_changes_are_allowed(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "moved.jsonl"
    original = run.stores.read_run_file(place).data.train
    shutil.copy(original, data)
    try:
        token_rows(original, count=13)
        with pytest.raises(RefusedError, match="has changed since the run began"):
            resume(place, 11)
        resume(place, 11, allow=True)
    finally:
        shutil.copy(data, original)
    assert "has changed since the run began" in caplog.text
