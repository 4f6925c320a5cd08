"""What holds for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator

import pytest

# A shell that starts the tests in the background has SIGINT ignored, which children would inherit:
# tests that interrupt a command need it to arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share the processors: with a thread for each of them in every worker they would only
# wait for one another.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // WORKERS)))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Have torch compute with two threads or more, also where workers share the processors."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker is left with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have what was logged be text: the names of files need not be, and workers send only that."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report
