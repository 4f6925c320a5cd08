"""Huge pages and locked memory, tried with the allocation that a run makes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from checkpoint.sizes import format_size
from megatrain.doctor.findings import Finding, Verdict
from tiering.arena import Arena
from tiering.limits import lock_limit

_TRIAL_NBYTES = 64 << 20
_MOST = 0.9
_PROC = Path("/proc/self")
_THP = Path("/sys/kernel/mm/transparent_hugepage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the kernel gave an arena of ``nbytes``."""

    nbytes: int
    huge_nbytes: int
    locked: bool


def attempt(nbytes: int = _TRIAL_NBYTES) -> Trial:
    """Return what an arena of ``nbytes`` gets."""
    with Arena(nbytes) as arena:
        with arena.take("trial", nbytes) as view:
            start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        huge = min(_huge_between(start, start + nbytes), nbytes)
        return Trial(nbytes=nbytes, huge_nbytes=huge, locked=arena.locked)


def _huge_between(start: int, end: int) -> int:
    """Return the bytes on huge pages of every mapping that touches a range (proc(5), smaps)."""
    found, inside = 0, False
    for line in (_PROC / "smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            low, high = (int(end, 16) for end in name.split("-"))
            inside = low < end and high > start
        elif inside and name == "AnonHugePages:":
            found += int(value.split()[0]) << 10
    return found


def page_findings() -> Iterator[Finding]:
    """Say whether memory comes on huge pages, and whether it can be locked."""
    trial = attempt()
    yield _huge_finding(trial)
    limit = lock_limit()
    nbytes = None if limit is None else limit.nbytes
    yield lock_finding(trial, limit_nbytes=nbytes, swap=psutil.swap_memory().total > 0)


def _huge_finding(trial: Trial) -> Finding:
    good = trial.huge_nbytes >= _MOST * trial.nbytes
    enabled, shared = _chosen(_THP / "enabled"), _chosen(_THP / "shmem_enabled")
    return Finding(
        subject="huge pages",
        verdict=Verdict.OK if good else Verdict.WARNING,
        found=f"{format_size(trial.huge_nbytes)} of {format_size(trial.nbytes)} tried came on "
        f"huge pages (enabled: {enabled}; for shared memory, which is not used: {shared})",
        advice="" if good else _huge_advice(enabled),
        values={"huge_nbytes": trial.huge_nbytes, "tried_nbytes": trial.nbytes},
    )


def _chosen(path: Path) -> str:
    try:
        text = path.read_text()
    except OSError:
        return "not in this kernel"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _huge_advice(enabled: str) -> str:
    cost = "transfers are up to twice as slow on small pages"
    if enabled in ("always", "madvise"):
        return f"{cost}: free memory is in small pieces; echo 1 > /proc/sys/vm/compact_memory"
    return f"{cost}: echo madvise > {_THP / 'enabled'}"


def lock_finding(trial: Trial, *, limit_nbytes: int | None, swap: bool) -> Finding:
    """Say how much memory can be kept from being swapped out; ``limit_nbytes`` None: all of it."""
    limited = limit_nbytes is not None or not trial.locked
    tried = f"{format_size(trial.nbytes)} could {'' if trial.locked else 'not '}be locked"
    limit = "no limit" if limit_nbytes is None else f"limit: {format_size(limit_nbytes)}"
    risk = "what is above it may be swapped out" if swap else "no harm: there is no swap"
    return Finding(
        subject="locked memory",
        verdict=(Verdict.WARNING if swap else Verdict.NOTE) if limited else Verdict.OK,
        found=f"{tried} when tried; {limit}" + (f"; {risk}" if limited else ""),
        advice="raise it: ulimit -l, or memlock in limits.conf" if limited and swap else "",
        values={"limit_nbytes": limit_nbytes},
    )
