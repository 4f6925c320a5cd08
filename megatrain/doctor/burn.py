"""A write so long that a drive's fast cache is full and what is behind it shows."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.sizes import format_size
from megatrain.doctor.filesystem import space
from megatrain.doctor.findings import Finding, Verdict
from megatrain.doctor.speed import gigabytes, milliseconds
from megatrain.doctor.stream import REQUEST, random_block, scratch, stream
from tiering.backends.probe import Access
from tiering.errors import CapacityError, RefusedError

_BINS = 64
_FALLS = 0.6  # of the rate at the start
_BIN_REQUESTS = 8  # of which two are under way: fewer, and their jitter looks like a rate
_ENOUGH_BINS = 4
_EDGE_BINS = 6  # start and end, but never more than half of the burn
_LOOK_EVERY = 1 << 30

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Burn:
    """A long write, in order.

    Attributes:
        bin_nbytes: What each rate is of.
        rates: Bytes per second, bin after bin.
        sync_s: What the fdatasync at the end took.
        cut: Why it ended early, if it did.
    """

    nbytes: int
    bin_nbytes: int
    rates: tuple[float, ...]
    sync_s: float
    cut: str = ""

    @property
    def head(self) -> float:
        """Bytes per second at the start."""
        return statistics.median(self.rates[: self._edge])

    @property
    def tail(self) -> float:
        """Bytes per second at the end."""
        return statistics.median(self.rates[-self._edge :])

    @property
    def _edge(self) -> int:
        return max(1, min(_EDGE_BINS, len(self.rates) // 2))

    @property
    def fell_after(self) -> int | None:
        """Bytes written when the rate fell for good, or None if it did not."""
        slow = _FALLS * self.head
        if self.tail >= slow:
            return None
        fast = [i for i, rate in enumerate(self.rates) if rate >= slow]
        return (fast[-1] + 1) * self.bin_nbytes


def reserve(total_nbytes: int) -> int:
    """Return what a burn leaves free of a file system of ``total_nbytes``."""
    return min(max(total_nbytes // 20, 64 << 20), 16 << 30)


def check(folder: Path, nbytes: int, access: Access) -> None:
    """Refuse a burn that would fill a drive or say nothing about it.

    Raises:
        RefusedError: It would be the speed of memory.
        CapacityError: It does not fit.
    """
    if access.in_ram:
        raise RefusedError(f"--burn {folder}: {access.filesystem} is RAM; name a folder on a drive")
    if not access.direct:
        raise RefusedError(f"--burn {folder}: needs direct I/O, but {access.reason}")
    free, total = space(folder)
    if nbytes > free - reserve(total):
        raise CapacityError(
            f"--burn {format_size(nbytes)}: {folder} has {format_size(free)} free, of which "
            f"{format_size(reserve(total))} stay free; burn at most "
            f"{format_size(max(free - reserve(total), 0))}"
        )


def burn(folder: Path, nbytes: int, on_progress: Progress) -> Burn:
    """Write ``nbytes`` to a file without a name in ``folder``; nothing of it stays.

    Ends early when other programs use up the space meanwhile.
    """
    bin_nbytes = max(nbytes // _BINS // REQUEST, _BIN_REQUESTS) * REQUEST
    clock = _Clock(folder, nbytes, bin_nbytes, on_progress)
    with scratch(folder, direct=True) as fd, random_block() as block:
        clock.start()
        moved = stream(os.pwritev, fd, nbytes, block, clock.on_moved)
        before = time.perf_counter()
        os.fdatasync(fd)
        sync_s = time.perf_counter() - before
    rates = tuple(clock.rates) or (moved / clock.elapsed_s,)
    return Burn(
        nbytes=moved, bin_nbytes=bin_nbytes, rates=rates, sync_s=sync_s, cut=clock.why_not_on
    )


class _Clock:
    """Takes the time of every bin, and watches the free space."""

    def __init__(self, folder: Path, nbytes: int, bin_nbytes: int, on_progress: Progress) -> None:
        self.rates: list[float] = []
        self.why_not_on = ""
        self._folder, self._nbytes, self._bin = folder, nbytes, bin_nbytes
        self._on_progress = on_progress
        self._looked = 0
        self.start()

    def start(self) -> None:
        self._began = self._last = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def on_moved(self, moved: int) -> bool:
        if moved >= (len(self.rates) + 1) * self._bin:
            now = time.perf_counter()
            self.rates.append(self._bin / (now - self._last))
            self._last = now
        self._on_progress(moved, self._nbytes)
        if moved - self._looked >= _LOOK_EVERY:
            self._looked = moved
            free, total = space(self._folder)
            if free < reserve(total):
                self.why_not_on = "other programs used up the space meanwhile"
        return not self.why_not_on


def burn_findings(folder: Path, nbytes: int, on_progress: Progress) -> Iterator[Finding]:
    """Burn and say whether the drive kept its pace."""
    yield burn_finding(burn(folder, nbytes, on_progress))


def burn_finding(result: Burn) -> Finding:
    """Say whether a drive kept its pace."""
    verdict, pace, advice = _pace(result)
    early = f"; ended early: {result.cut}" if result.cut else ""
    return Finding(
        subject="burn",
        verdict=verdict,
        found=f"{format_size(result.nbytes)} written in order: {pace}; sync at the end "
        f"{milliseconds(result.sync_s)}{early}\n{sparks(result.rates)}",
        advice=advice,
        values={
            "nbytes": result.nbytes,
            "bin_nbytes": result.bin_nbytes,
            "written_bytes_per_s": list(result.rates),
            "head_bytes_per_s": result.head,
            "tail_bytes_per_s": result.tail,
            "fell_after_nbytes": result.fell_after,
            "sync_s": result.sync_s,
        },
    )


def _pace(result: Burn) -> tuple[Verdict, str, str]:
    if len(result.rates) < _ENOUGH_BINS:
        least = format_size(_ENOUGH_BINS * result.bin_nbytes)
        return Verdict.UNKNOWN, "too short to tell start from end", f"burn {least} or more"
    head, tail = gigabytes(result.head), gigabytes(result.tail)
    if result.fell_after is None:
        pace = f"{head} at the start and {tail} at the end; a larger cache would not show"
        return Verdict.OK, f"kept its pace, {pace}", ""
    return (
        Verdict.WARNING,
        f"fell from {head} to {tail} after {format_size(result.fell_after)}",
        f"expect {tail} in a run: use a drive without such a cache, or more drives",
    )


def sparks(rates: Sequence[float]) -> str:
    """Return a curve from 0 to the largest rate, in one line."""
    bars, top = "▁▂▃▄▅▆▇█", max(rates)
    curve = "".join(bars[min(int(rate / top * len(bars)), len(bars) - 1)] for rate in rates)
    return f"{curve} 0 to {gigabytes(top)}"
