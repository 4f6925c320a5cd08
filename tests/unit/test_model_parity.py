"""Streamed training gives the numbers of plain transformers with torch's AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from megatrain.model.families import SUPPORTED
from tests.support.model_driver import IGNORED, AdamW, Batch, Driver
from tests.support.model_zoo import make_batch, make_plain

STEPS = 3


class Plain:
    """The reference: whole-model autograd, summed loss over the window's targets, AdamW."""

    def __init__(self, model: Any, options: AdamW) -> None:
        self.model, self.clip = model, options.clip
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=options.lr,
            eps=options.eps,
            weight_decay=options.weight_decay,
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
def test_llama_trains_as_in_plain_transformers(tied: bool, padded: bool, tmp_path: Path) -> None:
    train_beside_plain("llama", tmp_path, tied=tied, padded=padded)


@pytest.mark.parametrize("family", sorted(SUPPORTED - {"llama"}))
def test_a_supported_family_trains_as_in_plain_transformers(family: str, tmp_path: Path) -> None:
    train_beside_plain(family, tmp_path, tied=False, padded=False)
    train_beside_plain(family, tmp_path, tied=True, padded=True)


def train_beside_plain(family: str, folder: Path, *, tied: bool, padded: bool) -> None:
    plain = make_plain(family, folder, tied=tied)
    driver = Driver(folder, plain)
    assert driver.model.tied == tied
    reference = Plain(plain, AdamW())
    for step in range(STEPS):
        batches = window(step, padded=padded)
        loss, norm = driver.step(batches)
        assert (loss, norm) == pytest.approx(reference.step(batches), rel=1e-5)
        assert_same_gradients(driver, plain, norm)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            driver.parameters[name].detach(), parameter.detach(), rtol=0, atol=1e-5, msg=name
        )


def assert_same_gradients(driver: Driver, plain: Any, norm: float) -> None:
    for name, parameter in plain.named_parameters():
        grad = driver.parameters[name].grad
        assert (grad is None) == (parameter.grad is None), f"{name} is skipped by one of the two"
        if grad is not None and parameter.grad is not None:
            assert float((grad - parameter.grad).norm()) < 1e-5 * norm, name


def test_one_batch_of_four_equals_four_batches_of_one(tmp_path: Path) -> None:
    plain = make_plain("llama", tmp_path, tied=True)
    whole, parts = Driver(tmp_path, plain), Driver(tmp_path, plain)
    batch = make_batch(0, size=4)
    rows = [
        Batch(
            input_ids=batch.input_ids[i : i + 1],
            attention_mask=None,
            targets=batch.targets[i : i + 1],
        )
        for i in range(4)
    ]
    assert whole.gradients([batch]) == pytest.approx(parts.gradients(rows), rel=1e-6)
    norm = float(torch.cat(whole.grads).norm())
    for one, other in zip(whole.grads, parts.grads, strict=True):
        assert float((one - other).norm()) < 1e-6 * norm


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_loss_chunk_does_not_matter_in_float32(chunk: int, tmp_path: Path) -> None:
    plain = make_plain("gemma2", tmp_path, tied=False)
    driver, reference = Driver(tmp_path, plain, loss_chunk=chunk), Plain(plain, AdamW())
    batches = window(0, padded=True)
    assert driver.step(batches) == pytest.approx(reference.step(batches), rel=1e-5)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("chunk", [8, 64])
def test_bfloat16_gradients_are_those_of_plain_bfloat16(
    chunk: int, grad_dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = make_plain("llama", tmp_path, tied=True)
    for parameter in plain.parameters():  # .to() would round the rotary table as well
        parameter.data = parameter.data.bfloat16()
    driver = Driver(tmp_path, plain, dtype=torch.bfloat16, grad_dtype=grad_dtype, loss_chunk=chunk)
    batches = window(0, padded=False)[:1]
    loss = driver.gradients(batches)
    assert loss == pytest.approx(Plain(plain, AdamW()).gradients(batches), rel=1e-3)
    norm = float(torch.cat(driver.grads).float().norm())
    for unit, grads in zip(driver.units, driver.grads, strict=True):
        for t in unit.tensors:
            difference = grads[t.offset : t.end].view(t.shape) - plain.get_parameter(t.name).grad
            assert float(difference.float().norm()) < 5e-3 * norm, t.name
