"""Large requests back to back on one file, as the engine that drives the tiers makes them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tiering.arena import Arena
from tiering.backends.probe import open_unnamed
from tiering.errors import StorageError

REQUEST = 8 << 20
_IN_FLIGHT = 2

Move = Callable[[int, list[memoryview], int], int]


@contextmanager
def scratch(folder: Path, *, direct: bool) -> Iterator[int]:
    """Lend a descriptor of a file without a name: whatever happens, its space comes back."""
    fd = open_unnamed(folder, os.O_DIRECT if direct else 0)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def random_block() -> Iterator[memoryview]:
    """Lend a request of bytes that no drive can compress, on huge pages."""
    with Arena(REQUEST, lock=False) as arena, arena.take("block", REQUEST) as block:
        block[:] = os.urandom(REQUEST)
        yield block


def stream(
    move: Move, fd: int, nbytes: int, block: memoryview, on_moved: Callable[[int], bool]
) -> int:
    """Move up to ``nbytes`` from the start of ``fd``; return how many.

    ``on_moved`` is told the bytes moved so far after every request, and ends it with False.
    """
    with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="doctor") as pool:
        waiting: deque[Future[int]] = deque()
        moved, going = 0, True
        for offset in range(0, nbytes, len(block)):
            if len(waiting) == _IN_FLIGHT:
                moved += waiting.popleft().result()
                going = on_moved(moved)
            if not going:
                break
            waiting.append(pool.submit(_whole, move, fd, block[: nbytes - offset], offset))
        for future in waiting:
            moved += future.result()
            on_moved(moved)
    return moved


def _whole(move: Move, fd: int, block: memoryview, offset: int) -> int:
    moved = move(fd, [block], offset)
    if moved != len(block):
        action, path = move.__name__, os.readlink(f"/proc/self/fd/{fd}")
        raise StorageError(action, path, offset=offset, wanted=len(block), moved=moved)
    return moved
