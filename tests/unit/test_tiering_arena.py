from __future__ import annotations

import logging
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiering.arena import Arena
from tiering.backends.posix import address_of
from tiering.errors import CapacityError


def test_what_is_taken_is_zero_writable_aligned_and_apart() -> None:
    with Arena(3 * 4096) as arena:
        views = [arena.take("a", 5), arena.take("b", 4096), arena.take("c", 100)]
        assert [len(view) for view in views] == [5, 4096, 100]
        assert all(address_of(view) % 4096 == 0 for view in views)
        for number, view in enumerate(views):
            assert bytes(view) == bytes(len(view))
            view[:] = bytes([number + 1]) * len(view)
        assert [set(view) for view in views] == [{1}, {2}, {3}]
        assert arena.table() == [("a", 5), ("b", 4096), ("c", 100)]
        assert arena.free_nbytes == 0
        del views, view


def test_the_first_byte_lies_on_a_huge_page() -> None:
    with Arena(1) as arena:
        assert address_of(arena.take("a", 1)) % (2 << 20) == 0


def test_a_full_arena_says_what_was_asked_for_and_what_is_left() -> None:
    with Arena(8192) as arena:
        arena.take("a", 1)
        with pytest.raises(CapacityError, match="slab needs 8192 B, 4096 of 8192 B free"):
            arena.take("slab", 4097)
        with pytest.raises(ValueError, match="a was taken already"):
            arena.take("a", 1)


def test_memory_is_given_back_when_the_arena_is_closed() -> None:
    before = _mapped()
    for _ in range(20):
        with Arena(16 << 20) as arena:
            np.frombuffer(arena.take("a", 16 << 20), np.uint8)[:] = 1
    assert _mapped() < before + (32 << 20)


def _mapped() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("nbytes", [4096, (2 << 20) - 4096, (6 << 20) + 3 * 4096])
def test_an_arena_takes_exactly_its_size_of_memory(nbytes: int) -> None:
    with Arena(nbytes) as arena:
        start = address_of(arena.take("all", nbytes))
        assert _resident(start, start + nbytes) == nbytes


def _resident(start: int, stop: int) -> int:
    """Return how much is in memory of the mappings that ``start`` to ``stop`` reaches into."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            low, high = (int(number, 16) for number in words[0].split("-"))
            inside = low < stop and start < high
        elif inside and words[0] == "Rss:":
            found += int(words[1]) << 10
    return found


def test_memory_that_cannot_even_be_addressed_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"Cannot allocate memory; lower memory\.ram"):
        Arena(1 << 60)


def test_an_arena_in_use_is_not_unmapped() -> None:
    arena = Arena(4096)
    array = np.frombuffer(arena.take("weights", 4096), np.uint8)
    with pytest.raises(BufferError, match="in use by views of: weights"):
        arena.close()
    array[0] = 7
    assert array[0] == 7
    del array
    arena.close()
    arena.close()


LIMITED = """
import logging, resource, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
import ctypes
ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # drop CAP_IPC_LOCK from the bounding set
import os
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
from tiering.arena import Arena
with Arena(8 << 20) as arena:
    print("locked", arena.locked, bytes(arena.take("a", 3)))
"""


def test_memory_that_cannot_be_locked_is_used_and_says_how_to_raise_the_limit() -> None:
    ready = "import tiering.arena\n" + LIMITED  # imported before the rights are dropped
    done = subprocess.run([sys.executable, "-c", ready], capture_output=True, text=True, check=True)
    assert "locked False b'\\x00\\x00\\x00'" in done.stdout
    [line] = [line for line in done.stdout.splitlines() if "cannot lock" in line]
    assert "8388608 B of host memory" in line
    assert "the limit is 65536 B" in line
    assert "ulimit -l" in line


def test_locking_can_be_declined_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), Arena(4096, lock=False) as arena:
        assert not arena.locked
    assert not caplog.records
