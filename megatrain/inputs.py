"""What a run is made of, checked before anything is converted or allocated: plan and data."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoint.schema import Schema, Tensor
from megatrain import engine as engines
from megatrain import limits
from megatrain.config import RunConfig
from megatrain.data.dataset import Dataset, open_dataset, tokenizer_from_files
from megatrain.planner import Plan
from tiering.errors import RefusedError
from tiering.records import Record

log = logging.getLogger(__name__)

CONFIG = "config.json"
_POSITION_KEYS = ("max_position_embeddings", "n_positions")
_SPARE_ROWS = 2  # OPT's table of positions begins with two rows that no position uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The plan of a run that fits, and its data, open."""

    plan: Plan
    dataset: Dataset


def open_inputs(
    schema: Schema, records: Mapping[str, Record], files: Mapping[str, bytes], config: RunConfig
) -> Inputs:
    """Return plan and data of a run on a store of ``schema``; whoever asks closes the data.

    ``records`` are the store's, as they lie in it; ``files`` are the model's configuration and
    tokenizer, name to content.

    Raises:
        RefusedError: The plan does not fit, or the data cannot be used with this model.
    """
    device = engines.pick_device(config.train.device)
    plan = engines.make_plan(schema, records, config, device)
    first = engines.trained_units(schema)[0].tensors
    check_length(config.data.max_seq_len, files.get(CONFIG, b"{}"), first[1:])
    if config.train.warmup_steps >= config.train.steps:
        log.warning(
            "train.warmup_steps is %d and train.steps %d: the learning rate never reaches train.lr",
            config.train.warmup_steps,
            config.train.steps,
        )
    dataset = open_dataset(
        config.data.train,
        max_seq_len=config.data.max_seq_len,
        tokenizer=lambda: tokenizer_from_files(files),
        vocab_size=first[0].shape[0],
        skip_bad_lines=config.data.skip_bad_lines,
    )
    try:
        planning = engines.planning(schema, records, device)
        plan = limits.measured(plan, schema, files, config, device, planning)
    except BaseException:
        dataset.close()
        raise
    return Inputs(plan=plan, dataset=dataset)


def check_length(length: int, model: bytes, tables: tuple[Tensor, ...]) -> None:
    """Compare ``length`` with the positions that the model's config.json names.

    ``tables`` are what stands before the first layer beside the words: a table of learned
    positions is among them, and has nothing for a position past its end.
    """
    positions = _positions(json.loads(model))
    if positions is None or length <= positions:
        return
    for table in tables:
        if table.shape and 0 <= table.shape[0] - positions <= _SPARE_ROWS:
            raise RefusedError(
                f"data.max_seq_len is {length}, but the model has learned {positions} positions "
                f"({table.name}); lower it to {positions}"
            )
    log.warning(
        "data.max_seq_len is %d, longer than the %d positions that the model was made for",
        length,
        positions,
    )


def _positions(model: Mapping[str, Any]) -> int | None:
    inner = model.get("text_config")
    for part in (model, inner if isinstance(inner, dict) else {}):
        for key in _POSITION_KEYS:
            if isinstance(found := part.get(key), int) and found > 0:
                return found
    return None
