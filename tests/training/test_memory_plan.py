"""A run keeps to its memory plan, and says beforehand what does not fit."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import with_sets
from megatrain.report import plan_report
from tests.support.measured import memory_group, observed
from tests.support.runs import Quiet, run_config, tiny_llama, token_rows, train
from tiering.errors import CapacityError, RefusedError

MIB = 1 << 20


def config_of(folder: Path, **changes: Any) -> Any:
    model, data = folder / "model", folder / "rows.jsonl"
    if not model.exists():
        tiny_llama(model)
        token_rows(data)
    return run_config(model, data, folder / "run", **({"memory__workspace": "auto"} | changes))


def assert_kept(found: dict[str, Any]) -> None:
    assert "refused" not in found, found.get("refused")
    assert found["locked"] == (found["arenas"] if found["lock"] else 0)
    assert found["tables"] == found["planned"]
    assert 0.85 * found["total"] <= found["peak"] <= found["total"]


def test_peak_locked_bytes_and_arenas_are_those_of_the_plan(tmp_path: Path) -> None:
    resident = {"memory__resident": "200KiB", "memory__gradients": "disk"}
    cxl = {"memory__cxl": "30KiB", "memory__cxl_nodes": [0]}
    found = observed(config_of(tmp_path, train__dtype="bfloat16", **resident, **cxl))
    assert_kept(found)
    assert sorted(found["planned"]) == ["cxl", "pinned"]


def test_a_plan_over_the_limit_of_a_control_group_is_refused_before_it_is_allocated(
    tmp_path: Path,
) -> None:
    limit = 900 * MIB
    config = config_of(tmp_path, train__micro_batch=40_000, memory__ram="8GiB")
    with memory_group(limit) as group:
        found = observed(config, group=group)
    text = found["refused"]
    assert "memory.limit_in_bytes allows 0.88 GiB" in text
    assert re.search(r"activations +\d+\.\d MiB", text)
    assert re.search(r"imports +\d+\.\d MiB", text)
    assert re.search(r"train\.micro_batch: \d+ +needs", text)
    assert found["still_locked"] == 0
    assert found["peak"] < limit


def test_an_ordinary_user_trains_unlocked_and_is_told_how_to_lock(tmp_path: Path) -> None:
    config = config_of(tmp_path, memory__slab="1MiB", memory__resident=0)
    found = observed(config, lock_limit=256 << 10)
    assert not found["lock"]
    assert_kept(found)


def test_where_locking_is_required_what_exceeds_the_limit_is_refused(tmp_path, monkeypatch) -> None:
    from megatrain import limits
    from tiering.limits import Limit

    allowed = Limit(nbytes=100_000, source="RLIMIT_MEMLOCK")
    monkeypatch.setattr(limits, "lock_limit", lambda: allowed)
    with pytest.raises(CapacityError, match=r"memory\.lock is required.*ulimit -l") as refusal:
        train(config_of(tmp_path, memory__lock="required"))
    assert "what would help most:" in str(refusal.value)
    assert not (tmp_path / "run").exists()  # refused before the model was converted
    seen = train(config_of(tmp_path, memory__lock="auto"))
    assert "RLIMIT_MEMLOCK allows 97.66 KiB; raise it with ulimit -l" in text_of(seen)


def text_of(seen: Quiet) -> str:
    from rich.console import Console

    assert seen.plan is not None
    console = Console(width=200)
    with console.capture() as capture:
        console.print(plan_report(seen.plan, slots=2))
    return capture.get()


def test_the_printed_plan_adds_up(tmp_path: Path) -> None:
    seen = train(config_of(tmp_path, memory__lock=False))  # what YAML 1.1 makes of a plain off
    text = text_of(seen)
    assert "the arenas are not locked in memory: memory.lock is off" in text
    plan = seen.plan
    assert plan is not None
    assert plan.footprint is not None
    parts = plan.host_nbytes + plan.footprint.imports + plan.footprint.workspace.nbytes
    assert plan.total_nbytes == parts
    assert re.search(r"this process at most +[\d.]+ MiB", text)


def test_what_is_advised_for_a_machine_that_is_too_small_does_fit(tmp_path, monkeypatch) -> None:
    from megatrain import limits
    from tiering.limits import Limit
    from tiering.process import resident_nbytes

    allowed = Limit(nbytes=resident_nbytes() + 500 * MIB, source="the test's limit")
    monkeypatch.setattr(limits, "memory_limit", lambda: allowed)
    small = {"memory__ram": "8GiB", "memory__workspace": "16MiB"}
    config = config_of(tmp_path, train__micro_batch=20_000, **small)
    with pytest.raises(CapacityError, match="the test's limit allows") as refusal:
        train(config)
    advice = re.findall(r"^  ([a-z_.]+): (\S+) +needs (.*)$", str(refusal.value), re.MULTILINE)
    assert len(advice) == 2
    key, value = next((k, v) for k, v, needs in advice if "too much" not in needs)
    train(with_sets(config, [f"{key}={value}", "train.steps=1"]))


def test_a_store_in_memory_counts(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        seen = train(config.model_copy(update={"out": Path(folder) / "run"}))
    assert seen.plan is not None
    assert seen.plan.footprint is not None
    state = sum(record.padded_nbytes for record in seen.plan.records.values())
    assert 2 * state <= seen.plan.footprint.stored < 3 * state + MIB
    assert "store on drives that are memory" in text_of(seen)


def test_cxl_nodes_that_are_not_there_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no NUMA node 77"):
        train(config_of(tmp_path, memory__cxl="1MiB", memory__cxl_nodes=[77]))
    assert not (tmp_path / "run").exists()
