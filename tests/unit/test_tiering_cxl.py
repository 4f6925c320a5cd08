from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from tests.support.numa import local_node, missing_node
from tiering.arena import Arena
from tiering.backends import cxl
from tiering.backends.posix import address_of
from tiering.errors import CapacityError, RefusedError

GIB = 1 << 30

MEMINFO = """
Node {number} MemTotal:       {total} kB
Node {number} MemFree:        {free} kB
Node {number} MemUsed:        {used} kB
Node {number} Active(file):   1024 kB
Node {number} Inactive(file): 1024 kB
Node {number} HugePages_Total:     0
"""


def _tree(root: Path, *nodes: tuple[int, str, int]) -> Path:
    """Write what the kernel says of nodes with these numbers, processors and GiB of memory."""
    for number, cpus, gib in nodes:
        folder = root / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(cpus + "\n")
        total = gib << 20
        text = MEMINFO.format(number=number, total=total, free=total // 2, used=total // 2)
        (folder / "meminfo").write_text(text)
    (root / "possible").write_text("0-127\n")
    (root / "power").mkdir()
    return root


def test_nodes_with_memory_and_no_processors_are_found(tmp_path: Path) -> None:
    root = _tree(tmp_path, (0, "0-31", 64), (10, "", 256), (2, "", 128), (3, "", 0))
    assert [node.number for node in cxl.choose_nodes(root=root)] == [2, 10]
    [two, _] = cxl.choose_nodes(root=root)
    assert (two.nbytes, two.free_nbytes) == (128 * GIB, 64 * GIB + (2 << 20))


def test_a_machine_without_such_nodes_is_refused_in_one_sentence(tmp_path: Path) -> None:
    root = _tree(tmp_path, (0, "0-31", 64), (1, "32-63", 64))
    with pytest.raises(RefusedError) as caught:
        cxl.choose_nodes(root=root)
    assert str(caught.value) == (
        "no cxl tier on this machine: none of its 2 NUMA nodes has memory without processors; "
        "name some in memory.cxl_nodes, or set memory.cxl to 0"
    )


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="none of its 0 NUMA nodes"):
        cxl.choose_nodes(root=tmp_path / "absent")


def test_a_named_node_is_taken_although_it_has_processors(tmp_path: Path) -> None:
    root = _tree(tmp_path, (0, "0-31", 64), (2, "", 128))
    assert [node.number for node in cxl.choose_nodes([2, 0, 2], root=root)] == [2, 0]


def test_a_named_node_that_is_not_there_is_refused(tmp_path: Path) -> None:
    root = _tree(tmp_path, (0, "0-31", 64), (2, "", 128), (3, "", 0))
    for number in (1, 3):
        with pytest.raises(RefusedError, match=f"no NUMA node {number} .* this machine has 0, 2"):
            cxl.choose_nodes([0, number], root=root)


def test_more_than_the_nodes_have_free_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    nodes = cxl.choose_nodes(root=_tree(tmp_path, (0, "0", 8), (2, "", 4), (5, "", 4)))
    cxl.require_room(4 * GIB, nodes)
    with pytest.raises(CapacityError, match=f"need {5 * GIB} B, .* free on NUMA nodes 2, 5"):
        cxl.require_room(5 * GIB, nodes)
    node = local_node()
    with pytest.raises(CapacityError, match=f"free on NUMA nodes {node}"):
        Arena(1 << 45, nodes=(node,))


def test_every_page_of_a_bound_arena_is_proved_to_lie_on_its_node() -> None:
    node = local_node()
    with Arena((4 << 20) + 4096, nodes=(node,)) as arena:
        assert arena.nodes_found() == {node: 1025}
        view = arena.take("all", arena.nbytes)
        [line] = [line for line in _numa_maps() if line.startswith(f"{address_of(view):x} ")]
        assert f" bind:{node} " in line
        del view


def _numa_maps() -> list[str]:
    return Path("/proc/self/numa_maps").read_text().splitlines()


def test_an_arena_on_a_node_that_is_not_there_is_refused() -> None:
    number = missing_node()
    with pytest.raises(RefusedError, match=f"no NUMA node {number} with memory: this machine has"):
        Arena(4096, nodes=(number,))


def test_a_binding_that_the_kernel_refuses_says_why() -> None:
    with mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE) as pages:
        address = address_of(memoryview(pages))
        with pytest.raises(RefusedError, match=r"NUMA nodes 0, 70: .*"):
            cxl.bind(address + 1, 4096, [0, 70])  # not at a page's start


def test_pages_that_were_never_touched_lie_nowhere() -> None:
    local_node()
    with mmap.mmap(-1, 8 * 4096, flags=mmap.MAP_PRIVATE) as pages:
        array = np.frombuffer(pages, np.uint8)
        array[5 * 4096] = 1
        assert cxl.pages_by_node(array.ctypes.data, 8 * 4096).get(-1) == 7
        del array
