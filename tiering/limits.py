"""How much memory this process may have, and may lock: the smallest of what anybody sets."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tiering import fsops
from tiering.backends.probe import IN_RAM

_FILES = {"memory.max", "memory.limit_in_bytes"}
_CAP_IPC_LOCK = 1 << 14
_EVERY_UID = ["0", "0", "4294967295"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A number of bytes and what sets it."""

    nbytes: int
    source: str


def memory_limit(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Limit:
    """Return the smallest of physical memory and the limit of every cgroup above this process."""
    machine = Limit(nbytes=psutil.virtual_memory().total, source="this machine's memory")
    return min((machine, *_cgroups(membership, mount)), key=lambda limit: limit.nbytes)


def _cgroups(membership: Path, mount: Path) -> Iterator[Limit]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):  # version 2 names none, version 1 has a tree of its own
            yield from _upwards(mount / controllers, group)


def _upwards(root: Path, group: str) -> Iterator[Limit]:
    folder = root / group.lstrip("/")
    while True:
        for file in _FILES:
            found = _read(folder / file)
            if found is not None:
                yield found
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _read(path: Path) -> Limit | None:
    try:
        return Limit(nbytes=int(path.read_text()), source=str(path))
    except (OSError, ValueError):  # not there, or "max"
        return None


def lock_limit(process: Path = Path("/proc/self")) -> Limit | None:
    """Return how much this process may lock in memory, all in all; None where nothing limits it.

    CAP_IPC_LOCK lifts the limit only in the first user namespace: a root that a container has
    made up for itself is limited like anybody.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_lock_anything(process):
        return None
    return Limit(nbytes=soft, source="RLIMIT_MEMLOCK")


def _may_lock_anything(process: Path) -> bool:
    if (process / "uid_map").read_text().split() != _EVERY_UID:
        return False
    lines = (process / "status").read_text().splitlines()
    held = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return bool(held & _CAP_IPC_LOCK)


def in_memory(folder: Path) -> bool:
    """Return whether the files of ``folder`` are kept in memory and nowhere else."""
    return fsops.filesystem_type(folder) in IN_RAM
