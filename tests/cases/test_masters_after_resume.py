"""Masters come back from the store in every bit, never from the copy in bf16."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from checkpoint.export import export_hf
from megatrain import run
from megatrain.trainer import Stop
from tests.support.runs import (
    Quiet,
    differing,
    read_state,
    run_config,
    tiny_llama,
    token_rows,
    train,
)
from tiering.errors import RefusedError
from tiering.store import open_reader


def test_a_trip_through_bf16_would_change_every_master() -> None:
    torch.manual_seed(0)
    w = torch.randn(1000)
    back = w.bfloat16().float()
    assert not (back == w).any()
    assert ((back - w) / w).abs().max() < 2**-8


def digests(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "LOCK")
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_three_steps_and_three_are_six_in_every_bit_with_an_export_between(
    tmp_path: Path,
) -> None:
    inputs = tiny_llama(tmp_path / "model", tie=True), token_rows(tmp_path / "rows.jsonl")
    settings = {"train__steps": 6, "train__dtype": "bfloat16"}
    train(run_config(*inputs, tmp_path / "whole", **settings))
    stop = Stop()
    halves = run_config(*inputs, tmp_path / "halves", **settings)
    run.train(halves, Quiet(lambda row: row["step"] == 3 and stop.request()), stop)
    store, before = tmp_path / "halves/store", digests(tmp_path / "halves/store")
    export_hf(store, tmp_path / "exported", dtype="bfloat16")
    assert digests(store) == before
    run.resume(tmp_path / "halves", (), Quiet(), Stop())
    assert differing(read_state(tmp_path / "whole/store"), read_state(store)) == []
    states = []
    for name in ("whole", "halves"):
        with open_reader(tmp_path / name / "store") as reader:
            states.append((reader.manifest.train_state["updates"], reader.manifest.step))
    assert states == [(6, 6), (6, 6)]
    with pytest.raises(RefusedError, match=r"new run \(megatrain train with model: .*exported\)"):
        run.resume(tmp_path / "exported", (), Quiet(), Stop())
