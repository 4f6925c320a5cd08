"""What a generation knows of its run, beside the records: enough to go on without a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config import RunConfig
from tiering.errors import CorruptionError, UsageError
from tiering.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The state at the end of update ``step``.

    ``cursor`` counts samples since the run began; ``counts`` are Adam updates per parameter.
    Order and dropout are functions of seed, cursor and step, so no generator state is kept.
    """

    run_id: str
    config: RunConfig
    data: str
    step: int = 0
    cursor: int = 0
    skipped: int = 0
    counts: Mapping[str, int]

    @property
    def finished(self) -> bool:
        """Whether the run has made all its steps."""
        return self.step >= self.config.train.steps

    def encode(self) -> dict[str, Any]:
        """Return plain JSON values; parameters that share the commonest count are left out."""
        common = Counter(self.counts.values()).most_common(1)
        usual = common[0][0] if common else 0
        return {
            "run_id": self.run_id,
            "config": self.config.to_json(),
            "digest": self.config.digest(),
            "data": self.data,
            "step": self.step,
            "cursor": self.cursor,
            "skipped": self.skipped,
            "rng": {"scheme": "counter", "seed": self.config.train.seed},
            "updates": usual,
            "updates_of": {n: c for n, c in self.counts.items() if c != usual},
        }

    @classmethod
    def decode(cls, values: Mapping[str, Any], names: tuple[str, ...]) -> TrainState:
        """Return the state that :meth:`encode` made, for a model with these parameters.

        Raises:
            CorruptionError: A field is missing or does not have its type.
        """
        fields = Fields(values, Path("manifest"), "train_state")
        usual, odd = fields.integer("updates", 0), fields.counts("updates_of")
        return cls(
            run_id=fields.text("run_id"),
            config=_config(fields),
            data=fields.text("data"),
            step=fields.integer("step", 0),
            cursor=fields.integer("cursor", 0),
            skipped=fields.integer("skipped", 0),
            counts={name: odd.get(name, usual) for name in names},
        )


def _config(fields: Fields) -> RunConfig:
    text = fields.text("config")
    try:
        return RunConfig.from_json(text)
    except (UsageError, ValueError, RecursionError) as error:
        raise CorruptionError(f"{fields.source}: train_state.config: {error}") from error
