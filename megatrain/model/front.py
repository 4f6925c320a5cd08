"""The model's own code before its first layer, run on the rows of the table that a window needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatrain.model.capture import FrontRecorder, Route
from megatrain.model.templates import Template


class Front:
    """Runs the front of ``template``, whose embedding looks up gathered rows instead of a table.

    The model sees true token ids; only the embedding's lookup is turned into places among the rows.
    """

    def __init__(self, template: Template, route: Route, device: torch.device) -> None:
        self._base = template.base
        self._layers = len(template.layers)
        self._route = route
        self._embedding = template.embedding
        self._padding_id = template.embedding.padding_idx
        self._embedding.padding_idx = None  # it would mean a place among the rows, not a token
        self._embedding.register_forward_pre_hook(self._to_places)
        self._token_ids = torch.zeros(0, dtype=torch.int64, device=device)

    def run(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rows: nn.Parameter,
        token_ids: torch.Tensor,
    ) -> FrontRecorder:
        """Return the first layer's input and all calls; ``token_ids[i]`` is the token of row i."""
        recorder = FrontRecorder(self._layers)
        with self._table_is(rows, token_ids):
            recorder.run(
                self._route,
                lambda: self._base(
                    input_ids=input_ids, attention_mask=attention_mask, use_cache=False
                ),
            )
        return recorder

    def drop_padding(self, row_grads: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Zero the gradient of the padding token's row, which torch's embedding never trains."""
        if self._padding_id is not None:
            row_grads.masked_fill_((token_ids == self._padding_id).unsqueeze(1), 0.0)

    @contextmanager
    def _table_is(self, rows: nn.Parameter, token_ids: torch.Tensor) -> Iterator[None]:
        parameters = self._embedding._parameters
        absent, parameters["weight"] = parameters["weight"], rows
        self._token_ids = token_ids
        try:
            yield
        finally:
            parameters["weight"] = absent

    def _to_places(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor]:
        (ids,) = args
        places = torch.searchsorted(self._token_ids, ids).clamp_(max=len(self._token_ids) - 1)
        gathered = (self._token_ids[places] == ids).all()
        torch._assert_async(gathered, "the row of a token was not gathered")
        return (places,)
