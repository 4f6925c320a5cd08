"""Running the model's own code before and after its layers, with stand-ins in their place.

The front (embedding, positions, masks, rotary tables) runs once per micro-batch and tells what each
layer is called with. The tail (final norm, logit scale, soft cap) runs on a chunk that the last
stand-in returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from tiering.errors import RefusedError

_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device)


class LayerCall(NamedTuple):
    """What a layer is called with, besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Visitor = Callable[[int, torch.Tensor, LayerCall], torch.Tensor]


class Route:
    """Says what the stand-ins do; they do nothing outside of ``to``."""

    def __init__(self) -> None:
        self._visit: Visitor | None = None

    def __call__(self, index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Return what stand-in ``index`` answers to its call."""
        if self._visit is None:
            raise RuntimeError("a stand-in was called outside of a front or a tail")
        return self._visit(index, hidden, call)

    @contextmanager
    def to(self, visit: Visitor) -> Iterator[None]:
        """Let the stand-ins answer as ``visit`` does."""
        self._visit = visit
        try:
            yield
        finally:
            self._visit = None


class LayerStandIn(nn.Module):
    """Takes the place of one layer in the model's own loop; other attributes are the layer's."""

    def __init__(self, layer: nn.Module, index: int, route: Route) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule: the layer is bound and run elsewhere
        self.index = index
        self.route = route

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Answer as the route says."""
        hidden, *rest = args or (kwargs.pop("hidden_states"),)
        return self.route(self.index, hidden, LayerCall(tuple(rest), kwargs))


class _FrontDone(Exception):  # noqa: N818 - not an error: ends a forward whose rest is not wanted
    pass


class FrontRecorder:
    """The front's outcome: the first layer's hidden state and every layer's call."""

    def __init__(self, layers: int) -> None:
        self.calls: list[LayerCall] = []
        self._hidden: torch.Tensor | None = None
        self._layers = layers

    @property
    def hidden(self) -> torch.Tensor:
        """Input of the first layer, [B, S, H]."""
        if self._hidden is None or len(self.calls) != self._layers:
            raise RefusedError(f"the model called {len(self.calls)} of its {self._layers} layers")
        return self._hidden

    def run(self, route: Route, forward: Callable[[], object]) -> None:
        """Run ``forward`` until its last layer is called."""
        with route.to(self._visit):
            try:
                forward()
            except _FrontDone:
                return

    def _visit(self, index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        if index != len(self.calls):
            raise RefusedError(f"layer {index} is called when {len(self.calls)} is due")
        if self._hidden is None:
            self._hidden = hidden
        elif hidden is not self._hidden:
            raise RefusedError(
                f"the model changes or unpacks the hidden state before layer {index}"
            )
        require_constant(index, call)
        self.calls.append(call)
        if len(self.calls) == self._layers:
            raise _FrontDone
        return hidden


def chunk_injector(chunk: torch.Tensor, layers: int) -> Visitor:
    """Return a visitor for the tail: the last layer's output is ``chunk``."""

    def visit(index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        return chunk if index == layers - 1 else hidden

    return visit


def require_constant(index: int, call: LayerCall) -> None:
    """Return if nothing in ``call`` can carry a gradient or be changed by a layer.

    Raises:
        RefusedError: Something can; the message names it.
    """
    named = {**{f"argument {i + 1}": arg for i, arg in enumerate(call.args)}, **call.kwargs}
    for name, value in named.items():
        _require_constant(f"layer {index}: {name}", value)


def _require_constant(what: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise RefusedError(f"{what} carries a gradient into the layer; that is not streamed")
    elif isinstance(value, tuple):
        for item in value:
            _require_constant(what, item)
    elif not isinstance(value, _VALUES):
        kind = type(value).__name__
        raise RefusedError(f"{what} is a {kind}, which layers could share and change")
