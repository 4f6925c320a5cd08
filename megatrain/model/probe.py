"""Running front and tail once on zeros, to learn before a run whether the model can be cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from megatrain.model.front import Front
from megatrain.model.partition import Binding
from megatrain.model.tail import Tail
from tiering.errors import RefusedError


def require_cut(
    front: Front, tail: Tail, rest: Binding, outer_out: Binding, *, table_row: torch.Tensor
) -> None:
    """Return if front, layers and tail meet in the hidden state alone.

    No weights are needed: which parameters a result depends on is in the graph. ``table_row`` is
    any row of the table.

    Raises:
        RefusedError: A layer's argument carries a gradient, the hidden state is not passed on as
            it is, or a parameter is used on the other side of the layers.
    """
    before = rest.blanks(like=table_row, requires_grad=True)
    after = outer_out.blanks(like=table_row, requires_grad=True)
    with torch.enable_grad(), rest.seated(before), outer_out.seated(after):
        hidden = _run_front(front, table_row)
        _require_unused(hidden, outer_out, after, "stored after the layers but used before them")
        normed = _run_tail(tail, torch.zeros_like(hidden[:, 0]))
        _require_unused(normed, rest, before, "stored before the layers but used after them")


def _run_front(front: Front, table_row: torch.Tensor) -> torch.Tensor:
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=table_row.device)
    rows = nn.Parameter(table_row.unsqueeze(0))
    hidden = front.run(tokens, None, rows=rows, token_ids=tokens[0, :1]).hidden
    if hidden.shape != (1, 2, len(table_row)):
        raise RefusedError(
            f"the first layer takes {tuple(hidden.shape)} for tokens {tuple(tokens.shape)} and "
            f"embeddings of {len(table_row)}"
        )
    return hidden


def _run_tail(tail: Tail, chunk: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def product(normed: torch.Tensor) -> torch.Tensor:
        seen.append(normed)
        return normed.new_zeros((*normed.shape[:-1], 1))

    entry = chunk.requires_grad_()
    logits = tail.logits(entry, product)
    if len(seen) != 1 or logits.shape != (1, 1) or not seen[0].requires_grad:
        raise RefusedError("the model's output is not its head's product with the hidden state")
    return seen[0]


def _require_unused(
    result: torch.Tensor, binding: Binding, parameters: Sequence[nn.Parameter], why: str
) -> None:
    used = _used(result, parameters)
    for seat, is_used in zip(binding.seats, used, strict=True):
        if is_used:
            raise RefusedError(f"{seat.tensor.name} is {why}")


def _used(result: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Iterable[bool]:
    if not parameters:
        return []
    grads = torch.autograd.grad(
        result.sum(), list(parameters), allow_unused=True, retain_graph=True
    )
    return [grad is not None for grad in grads]
