from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.runs import run_config, tiny_llama, token_rows, train
from tiering.errors import CapacityError
from tiering.limits import memory_limit


def control_group(folder: Path, line: str, limits: dict[str, str]) -> tuple[Path, Path]:
    membership = folder / "cgroup"
    membership.write_text(f"12:cpu:/elsewhere\n{line}\n")
    for path, text in limits.items():
        place = folder / "mount" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return membership, folder / "mount"


def test_the_smallest_limit_of_all_parents_counts_in_version_2(tmp_path):
    limits = {"a/memory.max": "1000\n", "a/b/memory.max": "max\n", "a/b/c/memory.max": "5000\n"}
    found = memory_limit(*control_group(tmp_path, "0::/a/b/c", limits))
    assert found.nbytes == 1000
    assert found.source.endswith("a/memory.max")


def test_version_1_has_a_tree_of_its_own(tmp_path):
    limits = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/job/memory.limit_in_bytes": "4096\n",
    }
    found = memory_limit(*control_group(tmp_path, "4:memory:/job", limits))
    assert found.nbytes == 4096


def test_without_groups_the_machine_is_the_limit(tmp_path):
    found = memory_limit(tmp_path / "none", tmp_path)
    assert found.nbytes == psutil.virtual_memory().total


def test_a_plan_that_the_machine_cannot_hold_is_refused(tmp_path, monkeypatch):
    total = 100_000
    fake = type("Memory", (), {"total": total})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: fake)
    model, data = tiny_llama(tmp_path / "m"), token_rows(tmp_path / "rows.jsonl")
    with pytest.raises(CapacityError, match=r"this machine's memory allows 0\.00 GiB"):
        train(run_config(model, data, tmp_path / "run"))
