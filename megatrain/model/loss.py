"""The cross-entropy of a chunk of tokens, and its gradient in the logits' place."""

from __future__ import annotations

import torch

IGNORED = -100  # transformers' label of a position without a target


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    target_count: int,
    work: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunk's share of the mean loss, and that share's gradient by the logits.

    ``logits`` are [C, V], ``targets`` [C]. The loss is a float64 scalar on the device. The gradient
    is float32; besides the logits it is the only [C, V] tensor that exists, and lies in ``work``
    where that is given.
    """
    ignored = targets == IGNORED
    index = targets.masked_fill(ignored, 0).unsqueeze(1)
    if work is None:
        work = torch.empty_like(logits, dtype=torch.float32)
    work.copy_(logits)  # one buffer, from logits to gradient
    work.sub_(work.amax(dim=-1, keepdim=True))
    picked = work.gather(1, index)
    total = work.exp_().sum(dim=-1, keepdim=True)
    losses = (total.log() - picked).squeeze(1).masked_fill_(ignored, 0.0)
    work.div_(total * target_count)
    work.scatter_add_(1, index, work.new_full(index.shape, -1.0 / target_count))
    work.masked_fill_(ignored.unsqueeze(1), 0.0)
    return losses.sum(dtype=torch.float64) / target_count, work
