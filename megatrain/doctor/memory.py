"""How much memory there is, and who limits it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from checkpoint.sizes import format_size
from megatrain.doctor.findings import Finding, Verdict
from tiering.limits import Limit, memory_limit

_FIRST_CGROUP_NAMESPACE = "cgroup:[4026531835]"  # linux/proc_ns.h: PROC_CGROUP_INIT_INO


def memory_findings() -> Iterator[Finding]:
    """Say what memory this process can have."""
    machine = psutil.virtual_memory()
    yield Finding(
        subject="memory",
        verdict=Verdict.OK,
        found=f"{format_size(machine.total)}, {format_size(machine.available)} of it available",
        values={"total_nbytes": machine.total, "available_nbytes": machine.available},
    )
    yield group_finding(memory_limit(), machine.total)
    yield _swap_finding()
    yield from _promise_findings()


def group_finding(limit: Limit, total: int) -> Finding:
    """Say what the tightest limit is, and how much of it is used already."""
    above = _above()
    if limit.nbytes >= total:
        found = f"none lower than this machine's memory{above}"
        return Finding(subject="cgroup limit", verdict=Verdict.OK, found=found)
    used_nbytes = _used(limit)
    told = "" if used_nbytes is None else f", {format_size(used_nbytes)} of it in use, page cache "
    used = f"{told}included" if told else ""
    return Finding(
        subject="cgroup limit",
        verdict=Verdict.NOTE,
        found=f"{format_size(limit.nbytes)} is the tightest{used} ({limit.source}){above}",
        values={"limit_nbytes": limit.nbytes, "used_nbytes": used_nbytes},
    )


def _used(limit: Limit) -> int | None:
    """Return what is charged to the group of ``limit``, page cache included."""
    for name in ("memory.current", "memory.usage_in_bytes"):  # versions 2 and 1
        try:
            return int(Path(limit.source).with_name(name).read_text())
        except (OSError, ValueError):
            continue
    return None


def _above() -> str:
    try:
        mine = os.readlink("/proc/self/ns/cgroup")
    except OSError:
        return "; those of a container around this one, if any, cannot be seen"
    if mine == _FIRST_CGROUP_NAMESPACE:
        return ""
    return "; this is a container: limits set further out cannot be seen"


def _swap_finding() -> Finding:
    swap = psutil.swap_memory()
    if not swap.total:
        return Finding(subject="swap", verdict=Verdict.NONE, found="no swap is in use")
    return Finding(
        subject="swap",
        verdict=Verdict.NOTE,
        found=f"{format_size(swap.total)}, {format_size(swap.used)} used",
        values={"total_nbytes": swap.total, "used_nbytes": swap.used},
    )


def _promise_findings() -> Iterator[Finding]:
    """Say what stops an allocation before memory is full; nothing if nothing does."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        limit, given = (int(facts[k].split()[0]) << 10 for k in ("CommitLimit", "Committed_AS"))
        yield Finding(
            subject="overcommit",
            verdict=Verdict.WARNING,
            found=f"vm.overcommit_memory is 2: {format_size(max(limit - given, 0))} can still be "
            f"promised of {format_size(limit)}",
            advice="address space counts although it is not used: sysctl vm.overcommit_memory=0",
            values={"limit_nbytes": limit, "committed_nbytes": given},
        )
    for name, what in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")):
        soft, _ = resource.getrlimit(name)
        if soft != resource.RLIM_INFINITY:
            yield Finding(
                subject=what,
                verdict=Verdict.WARNING,
                found=f"at most {format_size(soft)}, address space that is never used included",
                advice=f"{what} unlimited",
                values={"limit_nbytes": soft},
            )
