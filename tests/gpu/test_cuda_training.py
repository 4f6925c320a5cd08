"""The same runs on a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from tests.support.runs import (
    differing,
    numbers,
    read_state,
    run_config,
    tiny_llama,
    token_rows,
    train,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("tie", [False, True])
def test_on_a_gpu_placement_changes_no_bit(tmp_path, tie):
    model, data = tiny_llama(tmp_path / "m", tie=tie), token_rows(tmp_path / "rows.jsonl")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, memory in {"ram": {}, "disk": {"memory__resident": 1}}.items():
        out = tmp_path / name
        train(run_config(model, data, out, train__device="cuda", **memory))
    states = [read_state(tmp_path / name / "store") for name in ("ram", "disk")]
    assert differing(*states) == []


def test_a_gpu_computes_what_the_cpu_computes(tmp_path):
    model, data = tiny_llama(tmp_path / "m", tie=True), token_rows(tmp_path / "rows.jsonl")
    for device in ("cpu", "cuda"):
        train(run_config(model, data, tmp_path / device, train__device=device))
    for cpu, cuda in zip(numbers(tmp_path / "cpu"), numbers(tmp_path / "cuda"), strict=True):
        assert cuda["loss"] == pytest.approx(cpu["loss"], rel=1e-4)
        assert cuda["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=1e-4)
