"""The order of samples, a pure function of seed, epoch and data: nothing to save but a cursor.

The cursor counts samples since the start of the run: epoch ``cursor // size``, position
``cursor % size``. Going on from a cursor reads nothing and draws no random number.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


def permutation(seed: int, epoch: int, fingerprint: str, size: int) -> npt.NDArray[np.int64]:
    """Return the order of one epoch: sorted by the raw output of a keyed Philox.

    The stream of a numpy bit generator never changes between releases; shuffles may.
    """
    key = hashlib.sha256(f"{seed}/{epoch}/{fingerprint}".encode()).digest()[:16]
    draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(size)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)


def window(cursor: int, size: int, n: int) -> tuple[range, int]:
    """Return the positions, at most ``n``, of the step that starts at ``cursor``, and its epoch.

    A window ends with its epoch, so the last one may be short.
    """
    epoch, start = divmod(cursor, size)
    return range(start, min(start + n, size)), epoch


def steps_per_epoch(size: int, n: int) -> int:
    """Return how many windows of ``n`` samples an epoch has; the last may be short."""
    return -(-size // n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which samples a step takes."""

    size: int
    fingerprint: str
    seed: int = 0
    shuffle: bool = True

    def window(self, cursor: int, n: int) -> tuple[tuple[int, ...], int]:
        """Return the sample numbers of the step that starts at ``cursor``, and its epoch."""
        positions, epoch = window(cursor, self.size, n)
        if not self.shuffle:
            return tuple(positions), epoch
        order = _cached_permutation(self.seed, epoch, self.fingerprint, self.size)
        return tuple(order[positions.start : positions.stop].tolist()), epoch


@functools.lru_cache(maxsize=1)  # the epoch in progress; 8 bytes a sample
def _cached_permutation(
    seed: int, epoch: int, fingerprint: str, size: int
) -> npt.NDArray[np.int64]:
    return permutation(seed, epoch, fingerprint, size)
