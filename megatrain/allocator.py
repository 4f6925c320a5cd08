"""The one place where this process's memory allocator is told how to behave.

By default glibc learns from what is freed how large a block has to be to get pages of its own, and
gives every thread a heap of its own. Both make the peak depend on the order in which the threads
of a run came to allocate: measured on SmolLM2-135M, it still grew by 25 MiB from step to step. With
one heap, the largest threshold that glibc takes, and no trimming of its own, the temporaries of a
computation find the room that those before have left: 3 page faults a step instead of 9,000.

But the head's temporaries do not fit the holes that those of the layers leave, nor the other way
round. So the heap is given back where one ends and the other begins, and wherever it has grown
beyond what was measured. Then the peak is the same in every step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from tiering.process import resident_nbytes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
_LARGEST_THRESHOLD = 32 << 20  # glibc refuses more
_NEVER = (1 << 31) - 4096


def keep_to_plan() -> None:
    """Let what the process takes depend on what it computes, not on the order of its threads."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return
    for option, value in (
        (_ARENA_MAX, 1),
        (_MMAP_THRESHOLD, _LARGEST_THRESHOLD),
        (_TRIM_THRESHOLD, _NEVER),
    ):
        mallopt(ctypes.c_int(option), ctypes.c_int(value))


def trim() -> None:
    """Give the allocator's free pages back to the system."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(ctypes.c_size_t(0))


class HeapKeeper:
    """Keeps what the process has resident within ``limit`` bytes, as far as free pages can do it.

    To be asked before each computation; one thread at a time.
    """

    def __init__(self, limit: int | None = None, *, trim: Callable[[], None] = trim) -> None:
        self.limit = limit
        self._trim = trim
        self._last = ""

    def before(self, part: str) -> None:
        """Make room for temporaries of ``part``, whose sizes are much alike."""
        changed, self._last = part != self._last, part
        if changed or (self.limit is not None and resident_nbytes() > self.limit):
            self._trim()
