"""The NUMA node that this machine has for certain, if memory may be bound to it at all."""

from __future__ import annotations

import pytest

from tiering.arena import Arena
from tiering.backends.cxl import find_nodes
from tiering.errors import RefusedError


def local_node() -> int:
    """Return the number of the first node; containers may forbid to bind memory to it."""
    nodes = find_nodes()
    if not nodes:
        pytest.skip("this kernel knows no NUMA nodes")
    try:
        Arena(4096, lock=False, nodes=(nodes[0].number,)).close()
    except RefusedError as refusal:
        pytest.skip(str(refusal))
    return nodes[0].number


def missing_node() -> int:
    """Return a number that no node has."""
    return max((node.number for node in find_nodes()), default=0) + 1
