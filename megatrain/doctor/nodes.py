"""NUMA nodes: where memory is, and whether some of it is CXL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from checkpoint.sizes import format_size
from megatrain.doctor.findings import Finding, Verdict
from tiering.arena import Arena
from tiering.backends.cxl import Node, find_nodes
from tiering.errors import MegatrainError

_TRIAL_NBYTES = 4 << 20
_CLOSE = 0.05


def node_findings(sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    """Say what nodes there are, and whether memory can be had of a chosen one."""
    nodes = find_nodes(sysfs / "devices" / "system" / "node")
    if not nodes:
        found = "the kernel lists none: it is built without NUMA, or hides it"
        yield Finding(subject="NUMA", verdict=Verdict.UNKNOWN, found=found)
        return
    yield _nodes_finding(nodes, machine_nbytes=psutil.virtual_memory().total)
    alone = [node for node in nodes if not node.cpus]
    yield _alone_finding(alone, sysfs)
    yield bind_finding(alone or nodes[:1])


def _nodes_finding(nodes: Sequence[Node], *, machine_nbytes: int) -> Finding:
    counted = sum(node.nbytes for node in nodes)
    agrees = abs(counted - machine_nbytes) < _CLOSE * machine_nbytes
    doubt = f"; the kernel counts {format_size(machine_nbytes)} for the whole machine: one is off"
    return Finding(
        subject="NUMA",
        verdict=Verdict.OK if agrees else Verdict.NOTE,
        found=f"{len(nodes)} node{'s' * (len(nodes) > 1)}: {'; '.join(map(_described, nodes))}"
        + ("" if agrees else doubt),
        values={"nodes": {node.number: node.nbytes for node in nodes}},
    )


def _described(node: Node) -> str:
    where = f"CPUs {node.cpus}" if node.cpus else "no CPUs"
    return f"node {node.number} has {format_size(node.nbytes)} and {where}"


def _alone_finding(alone: Sequence[Node], sysfs: Path) -> Finding:
    expanders = sorted(path.name for path in (sysfs / "bus" / "cxl" / "devices").glob("mem*"))
    if alone:
        # CXL is one of several kinds of memory that come as such a node; sysfs names no kind
        kind = f"CXL devices here: {', '.join(expanders)}" if expanders else "no CXL device is seen"
        return Finding(
            subject="memory-only nodes",
            verdict=Verdict.OK,
            found=f"{', '.join(str(node.number) for node in alone)} can be the cxl tier ({kind})",
            values={"nodes": [node.number for node in alone]},
        )
    if expanders:
        return Finding(
            subject="memory-only nodes",
            verdict=Verdict.NOTE,
            found=f"none, but there are CXL devices: {', '.join(expanders)}",
            advice="to have one as a node: daxctl reconfigure-device --mode=system-ram",
        )
    found = "none, and no CXL device is seen: there is no cxl tier on this machine"
    return Finding(subject="memory-only nodes", verdict=Verdict.NONE, found=found)


def bind_finding(nodes: Sequence[Node]) -> Finding:
    """Say whether memory bound to each of ``nodes`` comes from there."""
    names = ", ".join(str(node.number) for node in nodes)
    try:
        for node in nodes:
            with Arena(_TRIAL_NBYTES, lock=False, nodes=(node.number,)) as arena:
                arena.nodes_found()
    except MegatrainError as error:
        return Finding(
            subject="binding memory",
            verdict=Verdict.WARNING if not nodes[0].cpus else Verdict.NOTE,
            found=str(error),
            advice="the cxl tier needs it; a container needs --cap-add SYS_NICE, or a cpuset with "
            "these nodes",
        )
    return Finding(
        subject="binding memory",
        verdict=Verdict.OK,
        found=f"{format_size(_TRIAL_NBYTES)} bound to node {names} came from there",
    )
