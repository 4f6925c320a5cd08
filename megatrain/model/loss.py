"""The head's product and its cross-entropy, a chunk of tokens at a time.

C tokens of the chunk, V words, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

IGNORED = -100  # transformers' label of a position without a target
ROWS_AT_ONCE = 8192  # rows of the head's gradient per product; bounds what is widened to fp32

AddProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def cross_entropy(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, *, target_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunk's share of the mean loss, and that share's gradient by the logits.

    The loss is a float64 scalar on the device, the gradient is float32 [C, V]; besides the logits
    it is the only [C, V] tensor that exists.
    """
    counted = targets_C != IGNORED
    index_C1 = targets_C.masked_fill(~counted, 0).unsqueeze(1)
    log_p = torch.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
    picked_C = log_p.gather(1, index_C1).squeeze(1).masked_fill(~counted, 0.0)
    loss = -picked_C.sum(dtype=torch.float64) / target_count
    grad = log_p.exp_().div_(target_count)
    minus_one = grad.new_full(index_C1.shape, -1.0 / target_count)
    grad.scatter_add_(1, index_C1, minus_one)
    return loss, grad.masked_fill_(~counted.unsqueeze(1), 0.0)


def product_adder(dtype: torch.dtype, into: torch.dtype, device: torch.device) -> AddProduct:
    """Return ``add(acc_VH, grad_CV, hidden_CH)``, which adds ``grad_CV.T @ hidden_CH``.

    The choice depends on the data types and on what the device can do, on nothing else.
    """
    if dtype == into:
        return _add_plain
    return _add_wide_output if _has_wide_output(dtype, into, device) else _add_widened


def _has_wide_output(dtype: torch.dtype, into: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies ``dtype`` into ``into`` without rounding in between."""
    one = torch.ones((16, 16), dtype=dtype, device=device)
    try:
        torch.mm(one, one, out_dtype=into)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def _add_plain(acc_VH: torch.Tensor, grad_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    acc_VH.addmm_(grad_CV.t(), hidden_CH)


def _add_wide_output(acc_VH: torch.Tensor, grad_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    for acc, grad in _row_blocks(acc_VH, grad_CV):
        acc.add_(torch.mm(grad.t(), hidden_CH, out_dtype=acc.dtype))


def _add_widened(acc_VH: torch.Tensor, grad_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    hidden = hidden_CH.to(acc_VH.dtype)
    for acc, grad in _row_blocks(acc_VH, grad_CV):
        acc.addmm_(grad.to(acc.dtype).t(), hidden)


def _row_blocks(acc_VH: torch.Tensor, grad_CV: torch.Tensor) -> Any:
    return zip(acc_VH.split(ROWS_AT_ONCE), grad_CV.split(ROWS_AT_ONCE, dim=1), strict=True)


class HeadProduct(torch.autograd.Function):
    """``hidden @ weight.T + bias``; the weight's gradient goes to ``add(grad_CV, hidden_CH)``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        add: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.add = add
        return functional.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        grad_CV = grad.reshape(-1, grad.shape[-1])
        ctx.add(grad_CV, hidden.reshape(-1, hidden.shape[-1]))
        grad_bias = grad_CV.sum(0) if ctx.needs_input_grad[1] else None
        return grad @ weight, grad_bias, None, None
