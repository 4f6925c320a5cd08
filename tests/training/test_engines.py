"""What moves the shards changes no number."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain import run
from megatrain.trainer import Stop
from tests.support.libcuda import require_kvikio
from tests.support.runs import (
    Quiet,
    differing,
    numbers,
    read_state,
    run_config,
    tiny_llama,
    token_rows,
    train,
)
from tiering.backends.probe import probe


def test_kvikio_trains_the_same_bits_as_posix(tmp_path: Path) -> None:
    require_kvikio()
    if not probe(tmp_path).direct:
        pytest.skip(f"{tmp_path}: no direct I/O")
    from kvikio.statistics import SummaryMonitor

    model, data = tiny_llama(tmp_path / "m"), token_rows(tmp_path / "rows.jsonl")
    moved = {}
    for io in ("posix", "kvikio"):
        with SummaryMonitor() as monitor:
            train(run_config(model, data, tmp_path / io, memory__resident=0, store__io=io))
        moved[io] = monitor.get()
    assert moved["posix"].num_ops == 0
    assert min(moved["kvikio"].bytes_read, moved["kvikio"].bytes_written) > 500_000
    assert differing(*(read_state(tmp_path / io / "store") for io in moved)) == []
    assert numbers(tmp_path / "posix") == numbers(tmp_path / "kvikio")


def test_a_run_goes_on_with_another_engine(tmp_path: Path) -> None:
    require_kvikio()
    model, data = tiny_llama(tmp_path / "m"), token_rows(tmp_path / "rows.jsonl")
    changed = {"memory__resident": 0, "store__io": "posix"}
    train(run_config(model, data, tmp_path / "whole", **changed))
    stop = Stop()
    halfway = Quiet(lambda row: stop.request() if row["step"] == 1 else None)
    run.train(run_config(model, data, tmp_path / "parts", **changed), halfway, stop)
    run.resume(tmp_path / "parts", ["store.io=kvikio"], Quiet(), Stop())
    states = [read_state(tmp_path / name / "store") for name in ("whole", "parts")]
    assert differing(*states) == []
