"""What the doctor says of memory, nodes and GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.doctor import gpu, nodes, pages
from megatrain.doctor.findings import Finding, Verdict
from megatrain.doctor.memory import group_finding, memory_findings
from megatrain.doctor.pages import Trial, lock_finding
from megatrain.doctor.pci import link
from tiering.backends.cxl import find_nodes
from tiering.limits import Limit

MIB = 1 << 20


def elsewhere(code: str) -> list[dict[str, str]]:
    """Return the findings that ``code``, run in a process of its own, puts into ``found``."""
    first = "import dataclasses, json\n"  # ``code`` may give up the right to read more modules
    last = "\nprint(json.dumps([dataclasses.asdict(f) for f in found]))"
    command = [sys.executable, "-c", first + code + last]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def verdicts(findings: list[dict[str, str]]) -> dict[str, str]:
    return {finding["subject"]: finding["verdict"] for finding in findings}


# -- memory --------------------------------------------------------------------------------------


def test_memory_that_comes_on_small_pages_is_seen():
    found = elsewhere(
        "import ctypes\n"
        "ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE\n"
        "from megatrain.doctor.pages import page_findings\n"
        "found = list(page_findings())"
    )
    assert verdicts(found)["huge pages"] == "warning"
    assert found[0]["values"]["huge_nbytes"] == 0


def test_what_the_trial_got_is_what_the_kernel_counts():
    trial = pages.attempt(16 * MIB)
    assert 0 <= trial.huge_nbytes <= trial.nbytes == 16 * MIB
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert trial.huge_nbytes > 0


def test_a_limit_on_locked_memory_is_tried_and_told():
    found = elsewhere(
        "import ctypes, os, resource\n"
        "from megatrain.doctor import pages\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "if os.geteuid() == 0:\n"
        "    os.setuid(65534)  # no capability any more\n"
        "    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # and may still read its own /proc\n"
        "found = list(pages.page_findings())"
    )
    (lock,) = [f for f in found if f["subject"] == "locked memory"]
    assert lock["verdict"] in ("note", "warning")  # by whether this machine swaps
    assert "could not be locked when tried; limit: 1.0 MiB" in lock["found"]


@pytest.mark.parametrize(
    ("locked", "limit", "swap", "verdict"),
    [
        (True, None, True, Verdict.OK),
        (True, 128 * MIB, True, Verdict.WARNING),  # more than was tried, less than a run needs
        (True, 128 * MIB, False, Verdict.NOTE),
        (False, 8 * MIB, True, Verdict.WARNING),
        (False, None, True, Verdict.WARNING),
    ],
)
def test_a_lock_limit_matters_where_there_is_swap(locked, limit, swap, verdict):
    trial = Trial(nbytes=64 * MIB, huge_nbytes=0, locked=locked)
    found = lock_finding(trial, limit_nbytes=limit, swap=swap)
    assert found.verdict is verdict
    assert bool(found.advice) == (verdict is Verdict.WARNING)


def test_the_memory_that_is_told_is_the_machines():
    by_subject = {finding.subject: finding for finding in memory_findings()}
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert by_subject["memory"].values["total_nbytes"] == total
    assert "ulimit -v" not in by_subject


@pytest.mark.parametrize("name", ["memory.current", "memory.usage_in_bytes"])
def test_a_tight_cgroup_is_told_with_what_it_uses(tmp_path, name):
    (tmp_path / name).write_text(f"{3 << 30}\n")
    limit = Limit(nbytes=8 << 30, source=str(tmp_path / "memory.max"))
    found = group_finding(limit, 64 << 30)
    assert found.verdict is Verdict.NOTE
    assert "8.0 GiB is the tightest, 3.0 GiB of it in use" in found.found
    assert str(tmp_path) in found.found
    assert group_finding(limit, 8 << 30).verdict is Verdict.OK


def test_a_limit_of_address_space_is_told():
    found = elsewhere(
        "import resource\n"
        "from megatrain.doctor.memory import memory_findings\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "found = list(memory_findings())"
    )
    assert verdicts(found)["ulimit -v"] == "warning"


# -- nodes ---------------------------------------------------------------------------------------


def make_node(sysfs: Path, number: int, *, cpus: str, gib: int) -> None:
    folder = sysfs / "devices" / "system" / "node" / f"node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cpus}\n")
    lines = [f"Node {number} {name}: {gib << 20} kB" for name in ("MemTotal", "MemFree")]
    (folder / "meminfo").write_text("\n".join(lines) + "\n")


def about_nodes(sysfs: Path) -> dict[str, Finding]:
    return {finding.subject: finding for finding in nodes.node_findings(sysfs)}


def test_a_memory_only_node_is_found_but_not_called_cxl_without_a_sign_of_it(tmp_path):
    make_node(tmp_path, 0, cpus="0-7", gib=64)
    make_node(tmp_path, 2, cpus="", gib=256)
    found = about_nodes(tmp_path)
    assert found["memory-only nodes"].values == {"nodes": [2]}
    assert "no CXL device is seen" in found["memory-only nodes"].found
    assert "node 2 has 256.0 GiB and no CPUs" in found["NUMA"].found


def test_a_cxl_device_that_is_no_node_is_noted(tmp_path):
    make_node(tmp_path, 0, cpus="0-7", gib=64)
    (tmp_path / "bus" / "cxl" / "devices" / "mem0").mkdir(parents=True)
    found = about_nodes(tmp_path)["memory-only nodes"]
    assert found.verdict is Verdict.NOTE
    assert "mem0" in found.found
    assert "daxctl" in found.advice


def test_without_such_a_node_there_is_plainly_none(tmp_path):
    make_node(tmp_path, 0, cpus="0-7", gib=64)
    assert about_nodes(tmp_path)["memory-only nodes"].verdict is Verdict.NONE


def test_counts_that_contradict_the_machines_memory_are_doubted(tmp_path):
    make_node(tmp_path, 0, cpus="0-7", gib=1 << 14)
    found = about_nodes(tmp_path)["NUMA"]
    assert found.verdict is Verdict.NOTE
    assert "one is off" in found.found


def test_no_nodes_at_all_is_unknown(tmp_path):
    assert about_nodes(tmp_path)["NUMA"].verdict is Verdict.UNKNOWN


def test_binding_is_tried_and_not_assumed():
    here = find_nodes()
    if not here:
        pytest.skip("a kernel without NUMA")
    assert nodes.bind_finding(here[:1]).verdict in (Verdict.OK, Verdict.NOTE)
    gone = nodes.Node(number=900, cpus="", nbytes=1, free_nbytes=1)
    found = nodes.bind_finding([gone])
    assert found.verdict is Verdict.WARNING
    assert "900" in found.found


# -- GPU -----------------------------------------------------------------------------------------


def make_card(sysfs: Path, address: str, *, vendor: str, kind: str, **files: str) -> Path:
    folder = sysfs / "bus" / "pci" / "devices" / address
    folder.mkdir(parents=True)
    for name, text in {"vendor": vendor, "class": kind, **files}.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def test_a_card_that_torch_cannot_use_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    make_card(tmp_path, "0000:01:00.0", vendor="0x10de", kind="0x030200")
    make_card(tmp_path, "0000:01:00.1", vendor="0x10de", kind="0x040300")  # its sound
    make_card(tmp_path, "0000:00:02.0", vendor="0x8086", kind="0x030000")
    cards = gpu.nvidia_cards(tmp_path)
    assert cards == ["0000:01:00.0"]
    found = gpu.unused_finding(cards, built_for=None, why="this torch is built for CPUs only")
    assert found.verdict is Verdict.WARNING
    assert "0000:01:00.0" in found.found
    assert "torch for CUDA" in found.advice
    assert "CUDA 13.0" in gpu.unused_finding(cards, built_for="13.0", why="no driver").advice
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hide it" in gpu.unused_finding(cards, built_for="13.0", why="no device").advice


def test_without_a_card_there_is_none(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (found,) = gpu.gpu_findings(tmp_path, tmp_path)
    assert found.verdict is Verdict.NONE


def test_a_link_says_what_it_is_and_could_be(tmp_path):
    lanes = {"current_link_speed": "2.5 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
    lanes |= {"current_link_width": "8", "max_link_width": "16"}
    folder = make_card(tmp_path, "0000:01:00.0", vendor="0x10de", kind="0x030200", **lanes)
    found = link(folder)
    assert str(found) == "PCIe 2.5 GT/s x8, at most 32.0 GT/s x16"
    assert found.narrow
    (folder / "max_link_width").write_text("255\n")  # what a virtual machine shows
    assert link(folder) is None
    assert link(tmp_path) is None
