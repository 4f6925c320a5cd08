"""How much memory this process may have: the machine's, or less where a cgroup says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_FILES = {"memory.max", "memory.limit_in_bytes"}


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
