from __future__ import annotations

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from megatrain.lr_schedule import Schedule, lr


def rates(n: int, schedule: Schedule, warmup_steps: int, steps: int) -> list[float]:
    return [
        lr(k, base=1e-3, schedule=schedule, warmup_steps=warmup_steps, steps=steps)
        for k in range(n)
    ]


def torch_rates(n: int, scheduler_of) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = scheduler_of(optimizer)
    used = []
    for _ in range(n):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


def test_linear_decay_is_torchs_lambda_lr_bit_for_bit():
    def factor(k: int) -> float:
        return k / 4 if k < 4 else max(0.0, (12 - k) / 8)

    expected = torch_rates(12, lambda o: torch.optim.lr_scheduler.LambdaLR(o, factor))
    assert rates(12, "linear", 4, 12) == expected


def test_cosine_is_that_of_transformers():
    expected = torch_rates(20, lambda o: get_cosine_schedule_with_warmup(o, 5, 20))
    assert rates(20, "cosine", 5, 20) == pytest.approx(expected, rel=1e-12)


def test_constant_stays_at_the_base_after_the_warm_up():
    assert rates(6, "constant", 2, 3) == [0.0, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_decay_never_rises_again_past_the_horizon(schedule: Schedule):
    tail = rates(60, schedule, 4, 12)[4:]
    assert tail == sorted(tail, reverse=True)
    assert set(tail[8:]) == {0.0}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_horizon_inside_the_warm_up_divides_by_nothing(schedule: Schedule):
    assert rates(4, schedule, 10, 4) == pytest.approx([0.0, 1e-4, 2e-4, 3e-4])


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert rates(1, "cosine", 0, 10) == [1e-3]
