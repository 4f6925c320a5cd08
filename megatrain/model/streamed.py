"""One Hugging Face causal LM, computed unit by unit from buffers that somebody else owns.

Nothing is stored here between calls but the modules' attributes and views of the last buffers, and
no autograd graph outlives a call. Shapes: B sequences, S positions, H hidden size, V words,
R distinct token ids of a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from checkpoint.schema import Tensor, Unit
from megatrain.model.capture import FrontRecorder, LayerCall, LayerStandIn, Route
from megatrain.model.front import Front
from megatrain.model.partition import Binding, require_match, seats_of
from megatrain.model.probe import require_cut
from megatrain.model.products import Add, choose_products
from megatrain.model.tail import Tail
from megatrain.model.templates import Template, build, read_config
from tiering.errors import RefusedError


class Batch(Protocol):
    """What the front needs of a micro-batch; the targets go to the head alone."""

    @property
    def input_ids(self) -> torch.Tensor:
        """Token ids, int64 [B, S], on the model's device."""

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """1 where there is a token, [B, S]; None when nothing is padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterIn:
    """The part of the unit ``outer_in`` that a window needs.

    ``rows`` are the table's rows of ``token_ids``, which are sorted and distinct; ``rest`` is the
    unit's record from ``rest_offset`` on. All lie on the model's device.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    rest: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Input of the first layer, [B, S, H], and what each layer is called with."""

    hidden: torch.Tensor
    calls: tuple[LayerCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult:
    """A micro-batch's share of the mean loss (float64 scalar, on the device) and its gradient."""

    loss: torch.Tensor
    grad_hidden: torch.Tensor
    touched: frozenset[str]


class StreamedModel:
    """The mathematics of one causal LM, cut at its layers.

    ``units`` are ``outer_in``, the layers in order, and ``outer_out``. Weights have data type
    ``dtype``; accumulators of gradients may have it too, or be float32. ``buffers`` are the values
    of persistent buffers. Every method runs on ``device`` and on its current stream, and is called
    by one thread at a time; none waits for the device, unless the model's own code does.

    Buffers are read or added to during a call only, but each unit keeps the last two buffers of its
    weights alive until ``release``: pass the same few again and again, not fresh ones.

    Raises:
        RefusedError: The model is of a family without a parity test and ``any_family`` is off, is
            not what ``units`` hold, or cannot be cut without changing its gradients.
    """

    def __init__(
        self,
        config_dir: Path,
        units: Sequence[Unit],
        *,
        dtype: torch.dtype,
        device: torch.device,
        loss_chunk: int,
        any_family: bool = False,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        config = read_config(config_dir, any_family=any_family)
        template = build(config, dtype=dtype, device=device, buffers=buffers or {})
        require_match(template.parameters(), units, layer_prefix=template.layer_prefix)
        self.dtype = dtype
        self.device = device
        self.loss_chunk = loss_chunk
        self.tied = template.tied
        self.table = _table(template, units[0])
        self.vocab_size, self.hidden_size = self.table.shape
        self.layers = len(template.layers)
        self._template = template
        self._bind_units(units)
        self._insert_stand_ins()
        self._products = choose_products(dtype, device)
        row = torch.zeros(self.hidden_size, dtype=dtype, device=device)
        self._blank_rest = self._rest.blanks(like=row, requires_grad=False)
        require_cut(self._front, self._tail, self._rest, self._outer_out, table_row=row)

    @property
    def rest_offset(self) -> int:
        """Elements of ``outer_in`` that belong to the table and its gap; ``rest`` follows."""
        return self._rest.origin

    def capture(self, batch: Batch, outer: OuterIn, *, seed: int) -> Captured:
        """Return the first layer's input and every layer's call; without gradients."""
        with torch.no_grad(), self._rest.bound(outer.rest):
            recorder = self._run_front(batch, outer, nn.Parameter(outer.rows), seed)
        return Captured(hidden=recorder.hidden, calls=tuple(recorder.calls))

    def forward_layer(
        self, index: int, weights: torch.Tensor, hidden: torch.Tensor, call: LayerCall, *, seed: int
    ) -> torch.Tensor:
        """Return the output of layer ``index``, [B, S, H]; without gradients."""
        with torch.no_grad(), self._layers[index].bound(weights):
            return self._call_layer(index, hidden, call, seed)

    def backward_layer(
        self,
        index: int,
        weights: torch.Tensor,
        hidden: torch.Tensor,
        call: LayerCall,
        grad_out: torch.Tensor,
        grads: torch.Tensor,
        *,
        seed: int,
    ) -> tuple[torch.Tensor, frozenset[str]]:
        """Recompute layer ``index`` from its input and add its gradients to ``grads``.

        Returns the gradient by ``hidden`` and the names of the parameters that received one.
        """
        entry = hidden.detach().requires_grad_()
        with self._layers[index].learning(weights, grads) as touched:
            with torch.enable_grad():
                output = self._call_layer(index, entry, call, seed)
            torch.autograd.backward(output, grad_out)
        return _gradient(entry), frozenset(touched)

    def head(
        self,
        weights: torch.Tensor,
        table: torch.Tensor | None,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *,
        target_count: int,
        grads: torch.Tensor,
        table_grads: torch.Tensor | None,
    ) -> HeadResult:
        """Run the tail forward and backward, ``loss_chunk`` tokens at a time.

        ``table`` and ``table_grads`` are [V, H] when the head is tied and None otherwise. The loss
        is the sum over ``targets`` [B, S] divided by ``target_count``, which counts the whole
        window. Chunks without a target are skipped; keep ``targets`` on the host, since looking
        for such chunks waits for wherever they are.
        """
        if {table is None, table_grads is None} != {not self.tied}:
            raise ValueError("a tied head takes the table and its gradients, another neither")
        with (
            self._rest.seated(self._blank_rest),
            self._outer_out.learning(weights, grads) as touched,
        ):
            name, weight, acc = self._head_weight(table, table_grads)
            loss, grad_hidden = self._tail.train(
                hidden,
                targets,
                chunk=self.loss_chunk,
                target_count=target_count,
                weight=weight,
                products=self._products,
                add=self._adder(name, acc, touched),
            )
        return HeadResult(loss=loss, grad_hidden=grad_hidden, touched=frozenset(touched))

    def backward_outer(
        self,
        batch: Batch,
        outer: OuterIn,
        grad_hidden: torch.Tensor,
        *,
        seed: int,
        row_grads: torch.Tensor,
        rest_grads: torch.Tensor,
    ) -> frozenset[str]:
        """Recompute the front and add the gradients of ``rows`` and ``rest``.

        The row of the padding token receives none, as in torch. Returns the names of the
        parameters that received one.
        """
        rows = nn.Parameter(outer.rows)
        with self._rest.learning(outer.rest, rest_grads) as touched:
            with torch.enable_grad():
                hidden = self._run_front(batch, outer, rows, seed).hidden
            torch.autograd.backward(hidden, grad_hidden)
        if rows.grad is not None:
            self._front.drop_padding(rows.grad, outer.token_ids)
            row_grads.add_(rows.grad)
            touched.add(self.table.name)
        return frozenset(touched)

    def release(self) -> None:
        """Forget all buffers of weights, so that their memory can be given back."""
        for binding in (self._rest, *self._layers, self._outer_out):
            binding.release()
        self._tail.release()

    def _bind_units(self, units: Sequence[Unit]) -> None:
        model, (outer_in, *layers, outer_out) = self._template.model, units
        rest = outer_in.tensors[1:]
        origin = rest[0].offset if rest else outer_in.length
        self._rest = Binding(seats_of(model, rest), length=outer_in.length - origin, origin=origin)
        self._layers = [_whole(model, unit) for unit in layers]
        self._outer_out = _whole(model, outer_out)

    def _insert_stand_ins(self) -> None:
        route, template = Route(), self._template
        stands = [LayerStandIn(x, i, route) for i, x in enumerate(template.layers)]
        setattr(template.base, template.layer_list, nn.ModuleList(stands))
        self._front = Front(template, route, self.device)
        self._tail = Tail(template, route, self.device)

    def _call_layer(
        self, index: int, hidden: torch.Tensor, call: LayerCall, seed: int
    ) -> torch.Tensor:
        seed_device(self.device, seed)
        output = self._template.layers[index](hidden, *call.args, **call.kwargs)
        if not isinstance(output, torch.Tensor):
            raise RefusedError(
                f"layer {index} returns a {type(output).__name__}, not its hidden state"
            )
        return output

    def _run_front(
        self, batch: Batch, outer: OuterIn, rows: nn.Parameter, seed: int
    ) -> FrontRecorder:
        seed_device(self.device, seed)
        return self._front.run(
            batch.input_ids, batch.attention_mask, rows=rows, token_ids=outer.token_ids
        )

    def _head_weight(
        self, table: torch.Tensor | None, table_grads: torch.Tensor | None
    ) -> tuple[str, torch.Tensor, torch.Tensor]:
        if table is not None and table_grads is not None:
            return self.table.name, table, table_grads
        name = f"{self._template.head_name}.weight"
        return name, self._template.head.weight.detach(), self._outer_out.gradient(name)

    def _adder(self, name: str, acc: torch.Tensor, touched: set[str]) -> Add:
        def add(grad: torch.Tensor, hidden: torch.Tensor) -> None:
            self._products.add(acc, grad, hidden)
            touched.add(name)

        return add


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator that random operations on ``device`` draw from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _gradient(entry: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(entry) if entry.grad is None else entry.grad


def _whole(model: nn.Module, unit: Unit) -> Binding:
    return Binding(seats_of(model, unit.tensors), length=unit.length)


def _table(template: Template, outer_in: Unit) -> Tensor:
    first = outer_in.tensors[0]
    if first.name != template.embedding_name or first.offset:
        raise RefusedError(f"outer_in begins with {first.name}, not {template.embedding_name}")
    return first
