"""Memory of chosen NUMA nodes, such as CXL expanders: found, bound to, and proved to be there."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiering.errors import CapacityError, RefusedError

NODES = Path("/sys/devices/system/node")

_FREE = ("MemFree:", "Active(file):", "Inactive(file):")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_BATCH = 1 << 16  # pages of one query
_MPOL_BIND = 2
_WORD = 64
# mbind(2) and move_pages(2) have no wrapper in the C library.
_SYSCALLS: Mapping[str, tuple[int, int]] = {"x86_64": (237, 279), "aarch64": (235, 239)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One NUMA node as the kernel describes it; cached files make room and count as free."""

    number: int
    cpus: str
    nbytes: int
    free_nbytes: int


def find_nodes(root: Path = NODES) -> tuple[Node, ...]:
    """Return the nodes that have memory, by number."""
    folders = [path for path in root.glob("node*") if path.name[4:].isdecimal()]
    nodes = sorted((_read_node(path) for path in folders), key=lambda node: node.number)
    return tuple(node for node in nodes if node.nbytes)


def _read_node(folder: Path) -> Node:
    lines = (folder / "meminfo").read_text().splitlines()
    sizes = {words[2]: int(words[3]) << 10 for line in lines if len(words := line.split()) > 3}
    return Node(
        number=int(folder.name[4:]),
        cpus=(folder / "cpulist").read_text().strip(),
        nbytes=sizes.get("MemTotal:", 0),
        free_nbytes=sum(sizes.get(name, 0) for name in _FREE),
    )


def choose_nodes(named: Sequence[int] = (), *, root: Path = NODES) -> tuple[Node, ...]:
    """Return the named nodes, or all that have memory and no processors if none is named.

    Raises:
        RefusedError: There is no such node.
    """
    found = find_nodes(root)
    if not named:
        if alone := tuple(node for node in found if not node.cpus):
            return alone
        raise RefusedError(
            f"no cxl tier on this machine: none of its {len(found)} NUMA nodes has memory without "
            "processors; name some in memory.cxl_nodes, or set memory.cxl to 0"
        )
    by_number = {node.number: node for node in found}
    if missing := [number for number in named if number not in by_number]:
        raise RefusedError(
            f"no NUMA node {missing[0]} with memory: this machine has "
            f"{', '.join(str(number) for number in by_number)}"
        )
    return tuple(by_number[number] for number in dict.fromkeys(named))


def require_room(nbytes: int, nodes: Sequence[Node]) -> None:
    """Return if ``nodes`` together have ``nbytes`` free.

    Bound memory that does not fit is not refused by the kernel: it kills a process.

    Raises:
        CapacityError: They do not.
    """
    free = sum(node.free_nbytes for node in nodes)
    if nbytes > free:
        names = ", ".join(str(node.number) for node in nodes)
        raise CapacityError(
            f"cxl full: need {nbytes} B, {free} B free on NUMA nodes {names}; lower memory.cxl"
        )


def bind(address: int, nbytes: int, numbers: Sequence[int]) -> None:
    """Have every page of a range come from the nodes ``numbers`` when it is first touched.

    Raises:
        RefusedError: The kernel does not do it; the message says why.
    """
    words = np.zeros(max(numbers) // _WORD + 1, np.uint64)
    for number in numbers:
        words[number // _WORD] |= np.uint64(1 << number % _WORD)
    mask = words.ctypes.data_as(ctypes.c_void_p)
    maximum = len(words) * _WORD + 1  # the kernel takes one less than it is told
    code = _call(0, address, nbytes, _MPOL_BIND, mask, maximum, 0)
    if code:
        names = ", ".join(str(number) for number in numbers)
        raise RefusedError(
            f"cannot bind {nbytes} B of memory to NUMA nodes {names}: {os.strerror(code)}"
        )


def pages_by_node(address: int, nbytes: int) -> Mapping[int, int]:
    """Return how many pages of a range lie on each node, untouched ones counted as node -1."""
    found: Counter[int] = Counter()
    for start in range(address, address + nbytes, _BATCH * _PAGE):
        stop = min(address + nbytes, start + _BATCH * _PAGE)
        pages = np.arange(start, stop, _PAGE, dtype=np.uint64)
        found.update(_nodes_of(pages))
    return dict(sorted(found.items()))


def _nodes_of(pages: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> Mapping[int, int]:
    status = np.empty(len(pages), np.int32)
    code = _call(
        1,
        0,
        len(pages),
        pages.ctypes.data_as(ctypes.c_void_p),
        None,  # no targets: move nothing, only say where each page is
        status.ctypes.data_as(ctypes.c_void_p),
        0,
    )
    if code:
        raise RefusedError(f"cannot ask on which NUMA nodes memory lies: {os.strerror(code)}")
    numbers, counts = np.unique(np.maximum(status, -1), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _call(which: int, *arguments: object) -> int:
    """Make one of the two system calls and return its errno, 0 when it succeeded."""
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return ctypes.get_errno() if syscall(ctypes.c_long(numbers[which]), *words) < 0 else 0
