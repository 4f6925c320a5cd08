"""The model's own code after its last layer, with the loss, a chunk of tokens at a time.

Each chunk goes forward and backward before the next, so that only one chunk's logits ever exist.
C tokens of the chunk, V words, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from megatrain.model.capture import Route, chunk_injector
from megatrain.model.loss import IGNORED, HeadProduct, cross_entropy
from megatrain.model.templates import Template

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TailResult:
    """A micro-batch's share of the mean loss (float64 scalar, on the device) and its gradient."""

    loss: torch.Tensor
    grad_hidden: torch.Tensor


class HeadStandIn(nn.Module):
    """Takes the place of the head's Linear and leaves the product to somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self._product: Product | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``hidden``."""
        if self._product is None:
            raise RuntimeError("the head was called outside of a tail")
        return self._product(hidden)

    @contextmanager
    def being(self, product: Product) -> Iterator[None]:
        """Let ``product`` map hidden states to logits."""
        self._product = product
        try:
            yield
        finally:
            self._product = None


class Tail:
    """Runs the tail of ``template``, whose parameters are bound meanwhile."""

    def __init__(self, template: Template, route: Route) -> None:
        self._model = template.model
        self._layers = len(template.layers)
        self._route = route
        self._linear = template.head
        self._head = HeadStandIn()
        template.model.set_submodule(template.head_name, self._head)

    def logits(self, hidden: torch.Tensor, product: Product) -> torch.Tensor:
        """Return what the model makes of its last layer's output [C, H], with its own scaling.

        The tokens go in as C sequences of one token: what the model does about positions and masks
        before its layers is thrown away, so it costs little and never runs out of positions.
        """
        output = hidden.unsqueeze(1)
        visit = chunk_injector(output, self._layers)
        with self._route.to(visit), self._head.being(product):
            made = self._model(inputs_embeds=output.detach(), use_cache=False)
        logits: torch.Tensor = made.logits
        return logits.squeeze(1)

    def train(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *,
        chunk: int,
        target_count: int,
        weight: torch.Tensor,
        add: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> TailResult:
        """Return loss and gradient of ``hidden``; ``add(grad_CV, hidden_CH)`` gets the head's."""

        def product(normed: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = HeadProduct.apply(normed, self._linear.bias, weight, add)
            return logits

        flat, flat_targets = hidden.flatten(0, 1), targets.flatten()
        grad = torch.zeros_like(flat)
        loss = torch.zeros((), dtype=torch.float64, device=flat.device)
        for piece in live_chunks(flat_targets, chunk):
            wanted = flat_targets[piece].to(flat.device, non_blocking=True)
            loss += self._backward(flat[piece], wanted, target_count, product, out=grad[piece])
        return TailResult(loss=loss, grad_hidden=grad.view_as(hidden))

    def _backward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        target_count: int,
        product: Product,
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        entry = hidden.detach().requires_grad_()
        with torch.enable_grad():
            logits = self.logits(entry, product)
        loss, grad = cross_entropy(logits.detach(), targets, target_count=target_count)
        torch.autograd.backward(logits, grad.to(logits.dtype))
        if entry.grad is not None:
            out.copy_(entry.grad)
        return loss


def live_chunks(targets: torch.Tensor, chunk: int) -> list[slice]:
    """Return the chunks of ``targets`` that have one; waits for the device that holds them."""
    numbers = (targets != IGNORED).nonzero().flatten().div(chunk, rounding_mode="floor").unique()
    return [slice(number * chunk, (number + 1) * chunk) for number in numbers.tolist()]
