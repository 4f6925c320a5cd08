"""The head's product and its cross-entropy, a chunk of tokens at a time.

C tokens of the chunk, V words, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

IGNORED = -100  # transformers' label of a position without a target
ROWS_AT_ONCE = 8192  # rows of the head's gradient per product; bounds what is widened to fp32

Add = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes the gradient of the logits [C, V] and the hidden states [C, H] of a chunk."""
AddProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``add(acc, grad, hidden)`` adds ``grad.T @ hidden`` to ``acc`` [V, H]."""


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, target_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunk's share of the mean loss, and that share's gradient by the logits.

    ``logits`` are [C, V], ``targets`` [C]. The loss is a float64 scalar on the device. The gradient
    is float32; besides the logits it is the only [C, V] tensor that exists.
    """
    ignored = targets == IGNORED
    index = targets.masked_fill(ignored, 0).unsqueeze(1)
    work = logits.to(torch.float32, copy=True)  # one buffer, from logits to gradient
    work.sub_(work.amax(dim=-1, keepdim=True))
    picked = work.gather(1, index)
    total = work.exp_().sum(dim=-1, keepdim=True)
    losses = (total.log() - picked).squeeze(1).masked_fill_(ignored, 0.0)
    work.div_(total * target_count)
    work.scatter_add_(1, index, work.new_full(index.shape, -1.0 / target_count))
    work.masked_fill_(ignored.unsqueeze(1), 0.0)
    return losses.sum(dtype=torch.float64) / target_count, work


def product_adder(dtype: torch.dtype, into: torch.dtype, device: torch.device) -> AddProduct:
    """Return how products of ``dtype`` are added to accumulators of data type ``into``.

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


def _add_plain(acc: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    acc.addmm_(grad.t(), hidden)


def _add_wide_output(acc: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    for rows, columns in _row_blocks(acc, grad):
        rows.add_(torch.mm(columns.t(), hidden, out_dtype=acc.dtype))


def _add_widened(acc: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    wide = hidden.to(acc.dtype)
    for rows, columns in _row_blocks(acc, grad):
        rows.addmm_(columns.to(acc.dtype).t(), wide)


def _row_blocks(
    acc: torch.Tensor, grad: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(torch.split(acc, ROWS_AT_ONCE), torch.split(grad, ROWS_AT_ONCE, dim=1), strict=True)


class HeadProduct(torch.autograd.Function):
    """``hidden @ weight.T + bias``; ``add`` receives what the weight's gradient is made of."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, add: Add
    ) -> torch.Tensor:
        """Return the product."""
        ctx.save_for_backward(hidden, weight)
        ctx.add = add
        return functional.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Call ``add`` and return the gradients of hidden state and bias."""
        hidden, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        ctx.add(rows, hidden.reshape(-1, hidden.shape[-1]))
        return grad @ weight, rows.sum(0) if ctx.needs_input_grad[1] else None, None, None
