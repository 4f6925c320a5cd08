"""Streamed training gives the numbers of plain transformers with torch's AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.model_driver import IGNORED, AdamW, Batch, Driver
from tests.support.model_zoo import CONFIGS, make_batch, make_plain

STEPS = 3
FAMILIES = sorted(CONFIGS)


class Plain:
    """The reference: whole-model autograd, summed loss over the window's targets, AdamW."""

    def __init__(self, model: Any, options: AdamW) -> None:
        self.model, self.clip = model, options.clip
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.lr, weight_decay=options.weight_decay
        )

    def gradients(self, batches: Sequence[Batch]) -> float:
        self.optimizer.zero_grad()
        count = sum(int((b.targets != IGNORED).sum()) for b in batches)
        total = 0.0
        for batch in batches:
            logits = self.model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
            ).logits
            loss = functional.cross_entropy(
                logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum"
            )
            (loss / count).backward()
            total += float(loss.detach()) / count
        return total

    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        loss = self.gradients(batches)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss, float(norm)


def window(step: int, *, padded: bool) -> list[Batch]:
    return [make_batch(10 * step + i, padded=padded) for i in range(2)]


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_plain_transformers(
    family: str, tied: bool, padded: bool, tmp_path: Path
) -> None:
    plain = make_plain(family, tmp_path, tied=tied)
    driver = Driver(tmp_path, plain, any_family=True)
    reference = Plain(plain, AdamW())
    for step in range(STEPS):
        batches = window(step, padded=padded)
        loss, norm = driver.step(batches)
        assert (loss, norm) == pytest.approx(reference.step(batches), rel=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            driver.parameters[name].detach(), parameter.detach(), rtol=0, atol=1e-5, msg=name
        )
