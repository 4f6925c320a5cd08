"""Running an action in a process that is killed just before a chosen durable operation."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tiering import fsops


def killed_everywhere(action: Callable[[], None]) -> Iterator[int]:
    """Run ``action`` killed before its first, second, ... durable operation.

    Yields after each kill, and once more after the run that was not killed; that ends it.
    """
    number = 0
    while _killed_before(number, action):
        yield number
        number += 1
    assert number > 0, "the action has no durable operation"
    yield number


def _killed_before(number: int, action: Callable[[], None]) -> bool:
    """Return whether ``action`` was killed before its durable operation ``number``."""
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_child(number, action)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the action failed, see stderr"
    return False


def _run_child(number: int, action: Callable[[], None]) -> None:
    left = number

    def kill(_action: str, _path: Path) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    try:
        with fsops.observed(kill):
            action()
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must see it
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
