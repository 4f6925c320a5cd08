"""The three products of the head, each as the device does it best.

C tokens of a chunk, V words, H hidden size. Which way is taken depends on data type and hardware
alone, so that neither placement nor load changes a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

BLOCK_LENGTH = 1 << 21  # elements widened at once, 8 MiB of float32: near the cache, few barriers
NATIVE_BF16 = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")  # names of torch.cpu

Add = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes the gradient of the logits [C, V] and the hidden states [C, H] of a chunk."""


class Products:
    """Plain products, rounded to the operands' data type."""

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out`` [C, V] with ``hidden @ weight.T`` and return it."""
        return torch.mm(hidden, weight.t(), out=out)

    def grad_hidden(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``grad @ weight``, [C, H]."""
        return grad @ weight

    def add(self, acc: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add ``grad.T @ hidden`` to ``acc`` [V, H], never holding all of it elsewhere."""
        if acc.dtype == grad.dtype:
            acc.addmm_(grad.t(), hidden)
            return
        for rows, columns in _blocks(acc, grad):
            rows.add_(columns.t() @ hidden)


class WideOutputProducts(Products):
    """Products whose weight gradient reaches a float32 accumulator without being rounded."""

    def add(self, acc: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add ``grad.T @ hidden`` to ``acc`` [V, H], never holding all of it elsewhere."""
        if acc.dtype == grad.dtype:
            acc.addmm_(grad.t(), hidden)
            return
        for rows, columns in _blocks(acc, grad):
            rows.add_(torch.mm(columns.t(), hidden, out_dtype=acc.dtype))


class WidenedProducts(Products):
    """Products in float32, for processors that only emulate those of bfloat16.

    Four times as fast there, and rounded once instead of at every partial sum.
    """

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out`` [C, V] with ``hidden @ weight.T`` and return it."""
        wide = hidden.float()
        for rows, columns in _blocks(weight, out):
            columns.copy_(wide @ rows.float().t())
        return out

    def grad_hidden(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``grad @ weight``, [C, H]."""
        out = torch.zeros((len(grad), weight.shape[1]), dtype=torch.float32, device=grad.device)
        for rows, columns in _blocks(weight, grad):
            out.addmm_(columns.float(), rows.float())
        return out.to(grad.dtype)

    def add(self, acc: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add ``grad.T @ hidden`` to ``acc`` [V, H], never holding all of it elsewhere."""
        wide = hidden.float()
        for rows, columns in _blocks(acc, grad):
            if acc.dtype == torch.float32:
                rows.addmm_(columns.float().t(), wide)
            else:
                rows.add_(columns.float().t() @ wide)


def choose_products(dtype: torch.dtype, device: torch.device) -> Products:
    """Return the products for operands of ``dtype`` on ``device``."""
    if dtype.itemsize >= torch.float32.itemsize:
        return Products()
    if device.type == "cpu":
        return Products() if _multiplies_bf16() else WidenedProducts()
    return WideOutputProducts() if _has_wide_output(dtype, device) else Products()


def _multiplies_bf16() -> bool:
    """Whether this processor has instructions for it; older torch cannot tell: assume not."""
    query: Callable[[], Any] = getattr(torch.cpu, "get_capabilities", dict)
    found = query()
    return any(found.get(name, False) for name in NATIVE_BF16)


def _has_wide_output(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies ``dtype`` into float32 on ``device``."""
    one = torch.ones((16, 16), dtype=dtype, device=device)
    try:
        torch.mm(one, one, out_dtype=torch.float32)
    except (RuntimeError, TypeError):  # TypeError: torch before 2.8 knows no out_dtype
        return False
    return True


def _blocks(
    rows: torch.Tensor, columns: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut ``rows`` [V, H] and ``columns`` [C, V] along V."""
    length = max(1, BLOCK_LENGTH // max(rows.shape[1], len(columns)))
    return zip(torch.split(rows, length), torch.split(columns, length, dim=1), strict=True)


class HeadProduct(torch.autograd.Function):
    """``hidden @ weight.T + bias``; ``add`` receives what the weight's gradient is made of."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        products: Products,
        add: Add,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits, in ``out`` if given, shaped like ``hidden`` but for the last dim."""
        ctx.save_for_backward(hidden, weight)
        ctx.products, ctx.add = products, add
        flat = _flat(hidden)
        if out is None:
            out = flat.new_empty((len(flat), len(weight)))
        logits = products.logits(flat, weight, out)
        logits = logits.view(*hidden.shape[:-1], len(weight))
        return logits if bias is None else logits.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Call ``add`` and return the gradients of hidden state and bias."""
        hidden, weight = ctx.saved_tensors
        flat = _flat(grad)
        ctx.add(flat, _flat(hidden))
        grad_hidden = ctx.products.grad_hidden(flat, weight).view_as(hidden)
        return grad_hidden, flat.sum(0) if ctx.needs_input_grad[1] else None, None, None, None, None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
