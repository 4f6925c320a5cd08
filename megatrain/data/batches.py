"""Windows: what one optimizer step learns from, as padded tensors. B: batch, S: sequence."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatrain.data.dataset import Sample
from megatrain.data.jsonl import IGNORED
from megatrain.data.order import Order, steps_per_epoch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples of one forward and backward pass, padded on the right to the longest of them."""

    input_ids: torch.Tensor
    """[B, S] int64."""
    attention_mask: torch.Tensor | None
    """[B, S] int64, 1 where a token is; None when nothing is padded."""
    targets: torch.Tensor
    """[B, S] int64: the label of the next position, -100 where nothing is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One step's data. Its loss is the sum over all targets divided by ``targets``."""

    micro_batches: list[MicroBatch]
    indices: tuple[int, ...]
    """Numbers of the samples, in the order they are used."""
    epoch: int
    cursor: int
    """Where the next window starts."""
    targets: int
    """0: there is nothing to learn, and no step may be made."""
    samples: int
    tokens: int
    """Without padding."""
    truncated: int
    """Samples cut to the longest length."""
    unlabelled: int
    """Samples without a single target."""


@dataclass(slots=True)
class Tally:
    """What was odd about the samples of an epoch that this process has used."""

    samples: int = 0
    truncated: int = 0
    unlabelled: int = 0

    def add(self, window: Window) -> None:
        """Count the samples of ``window``."""
        self.samples += window.samples
        self.truncated += window.truncated
        self.unlabelled += window.unlabelled

    def report(self, epoch: int) -> None:
        """Log one line when there is something to say."""
        if self.truncated or self.unlabelled:
            log.warning(
                "epoch %d: of %d samples %d were cut to data.max_seq_len, %d had no label",
                epoch,
                self.samples,
                self.truncated,
                self.unlabelled,
            )


class Samples(Protocol):
    """Where samples come from."""

    def __getitem__(self, i: int) -> Sample:
        """Return sample ``i``."""
        ...


class Batches:
    """The windows of a run, each a function of its cursor."""

    def __init__(
        self, dataset: Samples, order: Order, *, micro_batch: int, accumulate: int
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.micro_batch = micro_batch
        self.samples_per_step = micro_batch * accumulate

    @property
    def steps_per_epoch(self) -> int:
        """Windows of an epoch, the short last one included."""
        return steps_per_epoch(self.order.size, self.samples_per_step)

    def window(self, cursor: int) -> Window:
        """Return the window that starts at ``cursor``, in samples since the run's start."""
        indices, epoch = self.order.window(cursor, self.samples_per_step)
        samples = [self.dataset[i] for i in indices]
        size = self.micro_batch
        return Window(
            micro_batches=[collate(samples[i : i + size]) for i in range(0, len(samples), size)],
            indices=indices,
            epoch=epoch,
            cursor=cursor + len(indices),
            targets=sum(sample.targets for sample in samples),
            samples=len(samples),
            tokens=sum(len(sample.input_ids) for sample in samples),
            truncated=sum(sample.truncated for sample in samples),
            unlabelled=sum(not sample.targets for sample in samples),
        )


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Return ``samples`` as one micro-batch. Padding is token 0: masked, and never a target.

    A sample without tokens is one of padding that is not masked: attention over nothing is no
    number.
    """
    shape = (len(samples), max(1, *(len(sample.input_ids) for sample in samples)))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORED, dtype=torch.int64)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        input_ids[row, :length] = torch.tensor(sample.input_ids)
        mask[row, : max(1, length)] = 1
        targets[row, : max(0, length - 1)] = torch.tensor(sample.labels[1:], dtype=torch.int64)
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=None if bool(mask.all()) else mask,
        targets=targets,
    )
