"""The one place where this process's memory allocator is told how to behave.

By default glibc learns from what is freed how large a block has to be to get pages of its own, and
gives every thread a heap of its own. Both make the peak depend on the order in which the threads
of a run came to allocate: measured, it still grew by 25 MiB after three steps. With one heap, the
largest threshold that glibc takes, and no trimming, the temporaries of a step find the room that
those of the step before have left. The peak is that of the second step, and the pages are not
faulted in again each time: 3 page faults a step instead of 9,000.
"""

from __future__ import annotations

import ctypes

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
