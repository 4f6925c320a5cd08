"""The model's own code after its last layer, with the loss, a chunk of tokens at a time.

Each chunk goes forward and backward before the next, so that only one chunk's logits ever exist.
C tokens of a chunk, V words, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatrain.model.capture import Route, StandIn, answer
from megatrain.model.loss import IGNORED, cross_entropy
from megatrain.model.products import Add, HeadProduct, Products
from megatrain.model.templates import Template

Product = Callable[[torch.Tensor], torch.Tensor]


class HeadStandIn(StandIn):
    """Takes the place of the head's Linear and leaves the product to somebody else."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head)
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


class Scratch:
    """The [C, V] tensors of a chunk, made once and used again by every chunk.

    Each is larger than all that a layer computes in a small model. Allocated anew for each chunk
    they leave holes that the next one does not fit, and a run takes more memory from step to step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose content is that of its last use, or none."""
        length = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < length or buffer.dtype != dtype:
            self._buffers.pop(name, None)  # gone before the larger one is made
            buffer = torch.empty(length, dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:length].view(*shape)

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()


class Tail:
    """Runs the tail of ``template``, whose parameters are bound meanwhile."""

    def __init__(self, template: Template, route: Route, device: torch.device) -> None:
        self._scratch = Scratch(device)
        self._model = template.model
        self._route = route
        self._linear = template.head
        self._head = HeadStandIn(template.head)
        template.model.set_submodule(template.head_name, self._head)

    def release(self) -> None:
        """Give back the memory that chunks use in turn."""
        self._scratch.clear()

    def logits(self, hidden: torch.Tensor, product: Product) -> torch.Tensor:
        """Return what the model makes of its last layer's output [C, H], with its own scaling.

        The tokens go in as C sequences of one token: what the model does about positions and masks
        before its layers is thrown away, so it costs little and never runs out of positions.
        """
        output = hidden.unsqueeze(1)
        with self._route.to(answer(output)), self._head.being(product):
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
        products: Products,
        add: Add,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss (float64 scalar) and the gradient by ``hidden``, both on its device.

        ``weight`` is the head's; ``add`` receives what its gradient is made of.
        """

        def product(normed: torch.Tensor) -> torch.Tensor:
            shape = (normed.numel() // normed.shape[-1], len(weight))
            out = self._scratch.take("logits", shape, normed.dtype)
            logits: torch.Tensor = HeadProduct.apply(  # type: ignore[no-untyped-call]
                normed, self._linear.bias, weight, products, add, out
            )
            return logits

        flat, flat_targets = hidden.flatten(0, 1), targets.flatten()
        grad = torch.zeros_like(flat)
        loss = torch.zeros((), dtype=torch.float64, device=flat.device)
        for piece in live_chunks(flat_targets, chunk):
            wanted = flat_targets[piece].to(flat.device, non_blocking=True)
            loss += self._backward(flat[piece], wanted, target_count, product, out=grad[piece])
        return loss, grad.view_as(hidden)

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
        work = self._scratch.take("work", logits.shape, torch.float32)
        loss, grad = cross_entropy(logits.detach(), targets, target_count=target_count, work=work)
        if grad.dtype != logits.dtype:
            grad = self._scratch.take("grad", logits.shape, logits.dtype).copy_(grad)
        torch.autograd.backward(logits, grad)
        if entry.grad is not None:
            out.copy_(entry.grad)
        return loss


def live_chunks(targets: torch.Tensor, chunk: int) -> list[slice]:
    """Return the chunks of ``targets`` that have one; waits for the device that holds them."""
    places = (targets != IGNORED).nonzero().flatten()
    numbers = torch.unique(places.div(chunk, rounding_mode="floor"))
    return [slice(number * chunk, (number + 1) * chunk) for number in numbers.tolist()]
