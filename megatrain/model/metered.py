"""A streamed model that notes how much memory each of its computations takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatrain.model.capture import LayerCall
from megatrain.model.streamed import Batch, Captured, HeadResult, OuterIn, StreamedModel
from tiering.process import PeakMeter


class MeteredModel(StreamedModel):
    """Computes only the layers ``picked``; the i-th layer that is asked for is the i-th of them.

    Attributes:
        picked: Numbers of layers.
        meter: Read after each computation.
        peaks: The most bytes that were resident, by the part of the model that was computed;
            ``rest`` is between two computations.
        call_nbytes: Bytes of the tensors that the layers were called with, all layers together.
    """

    def __init__(self, *args: Any, meter: PeakMeter, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.picked: Sequence[int] = range(self.layers)
        self.meter = meter
        self.peaks: dict[str, int] = defaultdict(int)
        self.call_nbytes = 0

    @property
    def layer_types(self) -> Sequence[str]:
        """What the model's configuration calls each layer; empty where all are alike."""
        return getattr(self._template.model.config, "layer_types", None) or ()

    @contextmanager
    def noted(self, part: str) -> Iterator[None]:
        """Note the peak of what is done inside as that of ``part``."""
        self._note("rest")
        try:
            yield
        finally:
            self._note(part)

    def _note(self, part: str) -> None:
        self.peaks[part] = max(self.peaks[part], self.meter.lap())

    def capture(self, batch: Batch, outer: OuterIn, *, seed: int) -> Captured:
        """See :meth:`StreamedModel.capture`; the calls are those of the picked layers."""
        with self.noted("outer"):
            found = super().capture(batch, outer, seed=seed)
        self.call_nbytes = max(self.call_nbytes, _nbytes(found.calls))
        calls = tuple(found.calls[i] for i in self.picked)
        return Captured(hidden=found.hidden, calls=calls)

    def forward_layer(self, index: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See :meth:`StreamedModel.forward_layer`."""
        with self.noted("layers"):
            return super().forward_layer(self.picked[index], *args, **kwargs)

    def backward_layer(
        self, index: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, frozenset[str]]:
        """See :meth:`StreamedModel.backward_layer`."""
        with self.noted("layers"):
            return super().backward_layer(self.picked[index], *args, **kwargs)

    def head(self, *args: Any, **kwargs: Any) -> HeadResult:
        """See :meth:`StreamedModel.head`."""
        with self.noted("head"):
            return super().head(*args, **kwargs)

    def backward_outer(self, *args: Any, **kwargs: Any) -> frozenset[str]:
        """See :meth:`StreamedModel.backward_outer`."""
        with self.noted("outer"):
            return super().backward_outer(*args, **kwargs)


def _nbytes(calls: Sequence[LayerCall]) -> int:
    """Return the bytes of all tensors in ``calls``; what they share counts once."""
    storages: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, tuple):
            for item in value:
                visit(item)

    for call in calls:
        visit((*call.args, *call.kwargs.values()))
    return sum(storages.values())
