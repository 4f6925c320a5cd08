"""The smallest driver of a StreamedModel: everything in memory, one Adam per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint.schema import Unit, layer_name, pack
from megatrain.model.streamed import OuterIn, StreamedModel

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    targets: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    lr: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 0.5


def make_units(model: Any) -> list[Unit]:
    """Cut the parameters of ``model`` by the order in which they were registered."""
    parameters = [(name, tuple(p.shape), "F32") for name, p in model.named_parameters()]
    base = model.base_model
    lists = [n for n, m in base.named_children() if isinstance(m, torch.nn.ModuleList)]
    prefix = f"{model.base_model_prefix}.{lists[0]}."
    first = next(i for i, p in enumerate(parameters) if p[0].startswith(prefix))
    count = len(getattr(base, lists[0]))
    layers = [
        pack(layer_name(i), [p for p in parameters if p[0].startswith(f"{prefix}{i}.")])
        for i in range(count)
    ]
    after = [p for p in parameters[first:] if not p[0].startswith(prefix)]
    return [pack("outer_in", parameters[:first]), *layers, pack("outer_out", after)]


def flatten(unit: Unit, values: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    flat = torch.zeros(unit.length, dtype=dtype)
    for t in unit.tensors:
        flat[t.offset : t.end] = values[t.name].detach().reshape(-1).to(dtype)
    return flat


def layer_seed(seed: int, batch: int, layer: int) -> int:
    return (seed * 1000 + batch) * 1000 + layer


class Driver:
    """Trains in vertical micro-batches with a global clip; gradients in ``grad_dtype``."""

    def __init__(
        self,
        config_dir: Path,
        plain: Any,
        *,
        dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        loss_chunk: int = 17,
        optimizer: AdamW = AdamW(),
        any_family: bool = False,
    ) -> None:
        self.units = make_units(plain)
        self.model = StreamedModel(
            config_dir,
            self.units,
            dtype=dtype,
            device=torch.device("cpu"),
            loss_chunk=loss_chunk,
            any_family=any_family,
        )
        values = dict(plain.named_parameters())
        self.flat = [flatten(u, values, torch.float32).requires_grad_() for u in self.units]
        self.weights = [f.detach().to(dtype) for f in self.flat]
        self.grads = [torch.zeros(u.length, dtype=grad_dtype) for u in self.units]
        self.parameters = {
            t.name: torch.nn.Parameter(f.detach()[t.offset : t.end].view(t.shape))
            for u, f in zip(self.units, self.flat, strict=True)
            for t in u.tensors
        }
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=optimizer.lr, weight_decay=optimizer.weight_decay
        )
        self.clip = optimizer.clip
        self.touched: set[str] = set()

    def gradients(self, batches: Sequence[Batch], *, seed: int = 0) -> float:
        """Fill ``grads`` with the gradient of the window's mean loss, which is returned."""
        for grad in self.grads:
            grad.zero_()
        self.touched = set()
        model, count = self.model, sum(int((b.targets != IGNORED).sum()) for b in batches)
        outer = self.outer_in(batches)
        captured = [
            model.capture(b, outer, seed=layer_seed(seed, i, 999)) for i, b in enumerate(batches)
        ]
        inputs = [[c.hidden] for c in captured]
        for layer in range(model.layers):
            for i, states in enumerate(inputs):
                call, key = captured[i].calls[layer], layer_seed(seed, i, layer)
                weights = self.weights[layer + 1]
                states.append(model.forward_layer(layer, weights, states[-1], call, seed=key))
        loss, grad_hidden = 0.0, []
        for i, batch in enumerate(batches):
            result = model.head(
                self.weights[-1],
                self.table(self.weights) if model.tied else None,
                inputs[i].pop(),
                batch.targets,
                target_count=count,
                grads=self.grads[-1],
                table_grads=self.table(self.grads) if model.tied else None,
            )
            loss += float(result.loss)
            self.touched |= result.touched
            grad_hidden.append(result.grad_hidden)
        for layer in reversed(range(model.layers)):
            for i in range(len(batches)):
                grad_hidden[i], touched = model.backward_layer(
                    layer,
                    self.weights[layer + 1],
                    inputs[i].pop(),
                    captured[i].calls[layer],
                    grad_hidden[i],
                    self.grads[layer + 1],
                    seed=layer_seed(seed, i, layer),
                )
                self.touched |= touched
        self._backward_outer(batches, outer, grad_hidden, seed)
        return loss

    def step(self, batches: Sequence[Batch], *, seed: int = 0) -> tuple[float, float]:
        """Train on one window; returns its loss and the norm of its gradient."""
        loss = self.gradients(batches, seed=seed)
        for unit, grads in zip(self.units, self.grads, strict=True):
            for t in unit.tensors:
                touched = t.name in self.touched
                grad = grads[t.offset : t.end].view(t.shape).float().clone()
                self.parameters[t.name].grad = grad if touched else None
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        self.optimizer.step()
        for weights, flat in zip(self.weights, self.flat, strict=True):
            weights.copy_(flat.detach())
        return loss, float(norm)

    def outer_in(self, batches: Sequence[Batch]) -> OuterIn:
        token_ids = torch.cat([b.input_ids.flatten() for b in batches]).unique()
        rest = self.weights[0][self.model.rest_offset :]
        return OuterIn(token_ids=token_ids, rows=self.table(self.weights)[token_ids], rest=rest)

    def table(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        return flats[0][: self.model.table.length].view(self.model.table.shape)

    def _backward_outer(
        self,
        batches: Sequence[Batch],
        outer: OuterIn,
        grad_hidden: Sequence[torch.Tensor],
        seed: int,
    ) -> None:
        row_grads = torch.zeros(outer.rows.shape, dtype=torch.float32)
        for i, batch in enumerate(batches):
            self.touched |= self.model.backward_outer(
                batch,
                outer,
                grad_hidden[i],
                seed=layer_seed(seed, i, 999),
                row_grads=row_grads,
                rest_grads=self.grads[0][self.model.rest_offset :],
            )
        table = self.table(self.grads)
        table.index_add_(0, outer.token_ids, row_grads.to(table.dtype))
