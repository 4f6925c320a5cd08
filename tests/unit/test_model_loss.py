"""The cross-entropy and the head's products, beside torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatrain.model.loss import IGNORED, cross_entropy
from megatrain.model.products import HeadProduct, Products, WidenedProducts, choose_products
from megatrain.model.tail import live_chunks

CPU = torch.device("cpu")


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_loss_and_gradient_are_torch_s(scale: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(9, 50) * scale).requires_grad_()
    targets = torch.randint(0, 50, (9,))
    targets[[2, 8]] = IGNORED
    expected = functional.cross_entropy(logits, targets, reduction="sum") / 21
    expected.backward()
    loss, grad = cross_entropy(logits.detach(), targets, target_count=21)
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(grad, logits.grad, rtol=1e-5, atol=1e-8)


def test_a_hopeless_target_has_a_finite_loss_and_an_ignored_row_hides_nothing() -> None:
    logits = torch.tensor([[0.0, 500.0], [float("nan"), 1.0]])
    loss, grad = cross_entropy(logits, torch.tensor([0, IGNORED]), target_count=1)
    assert float(loss) == 500.0
    assert grad.tolist() == [[-1.0, 1.0], [0.0, 0.0]]


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(4, 6)
    before = logits.clone()
    cross_entropy(logits, torch.zeros(4, dtype=torch.int64), target_count=4)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("products", [Products(), WidenedProducts()])
@pytest.mark.parametrize("acc_dtype", [torch.float32, torch.bfloat16])
def test_products_equal_exact_ones_up_to_one_rounding(
    products: Products, acc_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.model.products.BLOCK_LENGTH", 100)  # blocks of 12 and 6 rows
    torch.manual_seed(0)
    hidden, weight, bias, grad = (
        torch.randn(shape).bfloat16() for shape in ((5, 1, 8), (50, 8), (50,), (5, 1, 50))
    )
    hidden.requires_grad_()
    bias.requires_grad_()
    acc = torch.ones(50, 8, dtype=acc_dtype)
    logits = HeadProduct.apply(hidden, bias, weight, products, lambda g, h: products.add(acc, g, h))
    logits.backward(grad)
    wide_hidden, wide_grad = hidden.detach().double().squeeze(1), grad.double().squeeze(1)
    expected = wide_hidden @ weight.double().t() + bias.detach().double()
    rounding = {"rtol": 2e-2, "atol": 4e-2}
    torch.testing.assert_close(logits.squeeze(1).double(), expected, **rounding)
    torch.testing.assert_close(
        hidden.grad.squeeze(1).double(), wide_grad @ weight.double(), **rounding
    )
    torch.testing.assert_close(bias.grad.double(), wide_grad.sum(0), **rounding)
    torch.testing.assert_close(acc.double(), 1 + wide_grad.t() @ wide_hidden, **rounding)


def test_widened_products_do_not_round_on_the_way_to_a_float32_accumulator() -> None:
    torch.manual_seed(0)
    grad, hidden = torch.randn(7, 50).bfloat16(), torch.randn(7, 8).bfloat16()
    acc = torch.zeros(50, 8)
    WidenedProducts().add(acc, grad, hidden)
    torch.testing.assert_close(acc, grad.float().t() @ hidden.float(), rtol=1e-6, atol=1e-6)


def test_float32_is_multiplied_as_torch_does() -> None:
    assert type(choose_products(torch.float32, CPU)) is Products


def test_live_chunks_are_those_with_a_target() -> None:
    targets = torch.full((10,), IGNORED)
    targets[[0, 1, 9]] = 5
    assert live_chunks(targets, 4) == [slice(0, 4), slice(8, 12)]
    assert live_chunks(torch.full((10,), IGNORED), 4) == []
