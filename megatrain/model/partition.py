"""Where each tensor of a unit sits in the module tree, and how a flat buffer takes its place.

Binding swaps entries of ``Module._parameters`` for views of the buffer: nothing is copied, and the
module runs as fast as if it owned its weights.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from checkpoint.schema import Tensor, Unit
from tiering.errors import RefusedError

BUFFERS_KEPT = 2  # per unit; with double buffers a unit meets one of two


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The entry ``module._parameters[attribute]`` that takes ``tensor``."""

    module: nn.Module
    attribute: str
    tensor: Tensor


class _Bound:
    """The parameters that were made of the last few buffers.

    They hold their buffer's memory, so an address cannot come to mean another buffer meanwhile.
    """

    def __init__(self, make: Callable[[torch.Tensor], list[nn.Parameter]]) -> None:
        self._make = make
        self._kept: OrderedDict[tuple[int, int], list[nn.Parameter]] = OrderedDict()

    def __getitem__(self, flat: torch.Tensor) -> list[nn.Parameter]:
        key = (flat.data_ptr(), flat.numel())
        parameters = self._kept.pop(key, None)
        self._kept[key] = self._make(flat) if parameters is None else parameters
        if len(self._kept) > BUFFERS_KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]

    def clear(self) -> None:
        self._kept.clear()


class Binding:
    """The seats of some tensors of one unit, and the flat buffer that holds them while bound.

    ``origin`` is the offset in the record at which the buffers start, ``length`` their length in
    elements. The last ``BUFFERS_KEPT`` buffers of weights are kept alive until ``release``. Not
    reentrant, and used by one thread at a time.
    """

    def __init__(self, seats: Sequence[Seat], *, length: int, origin: int = 0) -> None:
        self.seats = tuple(seats)
        self.length = length
        self.origin = origin
        self._absent = [seat.module._parameters[seat.attribute] for seat in self.seats]
        self._parameters = _Bound(self._make_parameters)
        self._sink: Sequence[torch.Tensor] = ()
        self._in_place = False
        self._touched: set[str] = set()

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return ``flat`` seen as each tensor."""
        if flat.shape != (self.length,):
            raise ValueError(f"buffer of shape {tuple(flat.shape)}, need ({self.length},)")
        tensors = (seat.tensor for seat in self.seats)
        return tuple(flat[t.offset - self.origin :][: t.length].view(t.shape) for t in tensors)

    @contextmanager
    def bound(self, flat: torch.Tensor) -> Iterator[None]:
        """Let the modules compute with the content of ``flat``, which is only read."""
        with self.seated(self._parameters[flat]):
            yield

    @contextmanager
    def learning(self, flat: torch.Tensor, grads: torch.Tensor) -> Iterator[set[str]]:
        """Bind ``flat`` and let autograd add to ``grads``; yields the names it has touched.

        Gradients of the accumulator's data type are added by autograd itself; others are added
        one by one as they arrive, so that never more than one of them exists.
        """
        parameters = self._parameters[flat]
        self._sink, self._touched = self.views(grads), set()
        self._in_place = grads.dtype == flat.dtype
        if self._in_place:
            for parameter, view in zip(parameters, self._sink, strict=True):
                parameter.grad = view
        try:
            with self.seated(parameters):
                yield self._touched
        finally:
            self._sink = ()
            for parameter in parameters:
                parameter.grad = None

    def gradient(self, name: str) -> torch.Tensor:
        """Return where the gradient of tensor ``name`` goes; only while ``learning``."""
        names = [seat.tensor.name for seat in self.seats]
        return self._sink[names.index(name)]

    @contextmanager
    def seated(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Put one parameter on each seat, and take them away again."""
        self._seat(parameters)
        try:
            yield
        finally:
            self._seat(self._absent)

    def blanks(self, *, like: torch.Tensor, requires_grad: bool) -> list[nn.Parameter]:
        """Return zeros of the right shapes that take no memory."""
        zero = like.new_zeros(())
        return [
            nn.Parameter(zero.expand(seat.tensor.shape), requires_grad=requires_grad)
            for seat in self.seats
        ]

    def release(self) -> None:
        """Forget the buffers that were bound, so that their memory can be given back."""
        self._parameters.clear()

    def _seat(self, parameters: Iterable[nn.Parameter | None]) -> None:
        for seat, parameter in zip(self.seats, parameters, strict=True):
            seat.module._parameters[seat.attribute] = parameter

    def _make_parameters(self, flat: torch.Tensor) -> list[nn.Parameter]:
        parameters = [nn.Parameter(view) for view in self.views(flat)]
        for index, parameter in enumerate(parameters):
            arrived = functools.partial(self._arrived, index)
            parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        return parameters

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        self._touched.add(self.seats[index].tensor.name)
        if not self._in_place and parameter.grad is not None:
            self._sink[index].add_(parameter.grad)
            parameter.grad = None


def seats_of(model: nn.Module, tensors: Iterable[Tensor]) -> list[Seat]:
    """Return where ``model`` keeps each of ``tensors``, which it is known to have."""
    seats = []
    for tensor in tensors:
        path, _, attribute = tensor.name.rpartition(".")
        seats.append(Seat(module=model.get_submodule(path), attribute=attribute, tensor=tensor))
    return seats


def require_match(
    parameters: Mapping[str, tuple[int, ...]], units: Sequence[Unit], *, layer_prefix: str
) -> None:
    """Return if ``units`` hold exactly ``parameters``, each layer's in its own unit.

    Raises:
        RefusedError: Names or shapes differ, or a tensor is in the wrong unit.
    """
    if len(units) < 2:
        raise RefusedError(f"{len(units)} units; need outer_in, the layers and outer_out")
    held = {tensor.name: tensor.shape for unit in units for tensor in unit.tensors}
    _require_none("the model lacks", sorted(held.keys() - parameters.keys()))
    _require_none("the store lacks", sorted(parameters.keys() - held.keys()))
    for name, shape in parameters.items():
        if held[name] != shape:
            raise RefusedError(f"{name}: shape {held[name]} in the store, {shape} in the model")
    for index, unit in enumerate(units[1:-1]):
        _require_inside(unit, f"{layer_prefix}.{index}.")
    for unit in (units[0], units[-1]):
        _require_none(
            f"{unit.name} holds parameters of layers:",
            [t.name for t in unit.tensors if t.name.startswith(f"{layer_prefix}.")],
        )


def _require_inside(unit: Unit, prefix: str) -> None:
    strangers = [t.name for t in unit.tensors if not t.name.startswith(prefix)]
    _require_none(f"{unit.name} holds more than {prefix}*:", strangers)


def _require_none(what: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise RefusedError(f"{what} {', '.join(names[:3])}{more}")
