"""Placement never changes a number."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest
import torch

from checkpoint.convert import convert
from checkpoint.recode import Cut, recode
from checkpoint.schema import Layout
from megatrain import run
from megatrain.shape import PIECE
from megatrain.trainer import Stop
from tests.support.runs import (
    Quiet,
    as_float,
    differing,
    numbers,
    read_state,
    run_config,
    tiny_llama,
    token_rows,
    train,
)
from tiering.records import Tier
from tiering.store import open_reader

DISK = {"memory__resident": 1, "memory__gradients": "disk"}
BF16 = DISK | {"train__dtype": "bfloat16"}
MIXES = {
    "ram": {},
    "disk": DISK,
    "half": {"memory__resident": "700KiB", "memory__gradients": "ram"},
    "small slabs": DISK | {"memory__slab": PIECE},
    "cxl": {"memory__resident": 0, "memory__cxl": "64MiB", "memory__cxl_nodes": [0]},
    "zarr": DISK | {"store__tier": "zarr"},
    "zarr, small slabs": DISK
    | {"store__tier": "zarr", "store__codec": "zstd", "memory__slab": PIECE},
    "half in zarr": {
        "memory__resident": "700KiB",
        "store__tier": "zarr",
        "store__codec": "none",
    },
}


def wide_llama(folder: Path, *, tie: bool) -> Path:
    """A model whose table and layers span several of the smallest slabs."""
    return tiny_llama(
        folder, tie=tie, vocab_size=1500, hidden_size=96, intermediate_size=400, head_dim=24
    )


@pytest.mark.parametrize(("tie", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_ram_disk_and_any_mix_give_the_same_bits(tmp_path, tie, dtype):
    model = wide_llama(tmp_path / "model", tie=tie)
    data = token_rows(tmp_path / "rows.jsonl", vocab=1500)
    states, rows, tiers = {}, {}, {}
    for name, memory in MIXES.items():
        out = tmp_path / name
        seen = train(run_config(model, data, out, train__dtype=dtype, **memory))
        states[name], rows[name] = read_state(out / "store"), numbers(out)
        tiers[name] = seen.plan.tiers if seen.plan else {}
    for name in MIXES:
        assert differing(states["ram"], states[name]) == [], name
        assert rows["ram"] == rows[name], name
    assert Tier.NVME not in tiers["ram"]
    assert tiers["disk"].get(Tier.PINNED, 0) < tiers["disk"][Tier.NVME] / 100
    assert {Tier.PINNED, Tier.NVME} <= tiers["half"].keys()
    weights_in_cxl = {Tier.CXL, Tier.NVME} if dtype == "bfloat16" else {Tier.NVME}
    assert tiers["cxl"].keys() == weights_in_cxl  # in float32 the masters are what is streamed
    assert Tier.NVME not in tiers["zarr"]
    assert {Tier.PINNED, Tier.ZARR} == tiers["half in zarr"].keys()


def test_several_drives_read_at_once_give_the_same_bits(tmp_path):
    model = tiny_llama(tmp_path / "model")
    data = token_rows(tmp_path / "rows.jsonl")
    train(run_config(model, data, tmp_path / "one", **BF16))
    drives = [tmp_path / name for name in "abc"]
    for drive in drives:
        drive.mkdir()
    many = run_config(model, data, tmp_path / "three", store__drives=[*map(str, drives)], **BF16)
    readers = set()
    train(many, Quiet(after=lambda row: readers.update(_lanes("io_read"))))
    assert len(readers) == 3
    expected, found = (read_state(tmp_path / name / "store") for name in ("one", "three"))
    assert differing(expected, found) == []
    assert numbers(tmp_path / "one") == numbers(tmp_path / "three")


def _lanes(name):
    return {t.name for t in threading.enumerate() if t.name.startswith(f"lane-{name}")}


CUTS = {
    "moments in zarr": Cut(codec="zstd", records=("*.exp_avg*",)),
    "small shards": Cut(codec="blosc-lz4-bitshuffle", shard_nbytes=1 << 20),
    "small raw shards": Cut(shard_nbytes=1 << 20),
}


def test_a_store_that_is_cut_anew_trains_to_the_same_bits(tmp_path):
    model = wide_llama(tmp_path / "model", tie=False)
    data = token_rows(tmp_path / "rows.jsonl", vocab=1500)
    train(run_config(model, data, tmp_path / "plain", **BF16))
    expected = read_state(tmp_path / "plain" / "store")
    for name, cut in CUTS.items():
        store = tmp_path / name
        convert(model, store)
        recode(store, cut)
        seen = train(run_config(store, data, tmp_path / f"{name} run", **BF16))
        assert differing(expected, read_state(store)) == [], name
        assert numbers(tmp_path / "plain") == numbers(tmp_path / f"{name} run"), name
        assert seen.plan
    tiers = {name: len({record.tier for record in cut_records(tmp_path / name)}) for name in CUTS}
    assert tiers == {"moments in zarr": 2, "small shards": 1, "small raw shards": 1}


def cut_records(store):
    with open_reader(store) as reader:
        return list(reader.records.values())


def test_a_run_is_resumed_after_its_store_was_cut_anew(tmp_path):
    model = tiny_llama(tmp_path / "m")
    data = token_rows(tmp_path / "rows.jsonl")
    train(run_config(model, data, tmp_path / "whole", train__steps=4, **DISK))
    stop = Stop()
    out = tmp_path / "cut"
    config = run_config(model, data, out, train__steps=4, **DISK)
    run.train(config, Quiet(after=lambda row: row["step"] == 2 and stop.request()), stop)
    recode(out / "store", Cut(codec="zstd"))
    run.resume(out, [], Quiet(), Stop())
    expected, found = (read_state(tmp_path / name / "store") for name in ("whole", "cut"))
    assert differing(expected, found) == []
    assert numbers(tmp_path / "whole") == numbers(out)


def test_a_run_in_float32_on_a_store_with_bf16_weights_keeps_them_in_step(tmp_path):
    model, data = tiny_llama(tmp_path / "m"), token_rows(tmp_path / "rows.jsonl")
    states = {}
    for layout in (Layout.FP32, Layout.FLOAT32):
        store = tmp_path / layout
        convert(model, store, layout=layout)
        train(run_config(store, data, tmp_path / f"{layout}-run"))
        states[layout] = read_state(store)
    both = states[Layout.FLOAT32].keys()
    assert [k for k in both if (states[Layout.FP32][k] != states[Layout.FLOAT32][k]).any()] == []
    for key in both:
        if key.endswith("/master"):
            master = torch.from_numpy(as_float(states[Layout.FP32], key).copy())
            weights = states[Layout.FP32][key.replace("/master", "/weights")].copy()
            derived = torch.from_numpy(weights).view(torch.bfloat16)
            assert torch.equal(master.bfloat16(), derived)


def all_tokens(path: Path) -> Path:
    """Every token id in every step of 4 samples."""
    ids = torch.randperm(96, generator=torch.Generator().manual_seed(3)).tolist()
    rows = [ids[i : i + 24] for i in range(0, 96, 24)] * 3
    lines = [json.dumps({"input_ids": r, "labels": r}) + "\n" for r in rows]
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize(
    ("memory", "accumulate"), itertools.product(MIXES.values(), (1, 2)), ids=str
)
def test_every_parameter_trains_on_every_tier(tmp_path, memory, accumulate):
    model, data = tiny_llama(tmp_path / "m"), all_tokens(tmp_path / "rows.jsonl")
    before = tmp_path / "before"
    convert(model, before)
    config = run_config(
        model,
        data,
        tmp_path / "run",
        data__shuffle=False,
        train__micro_batch=4 // accumulate,
        train__accumulate=accumulate,
        **memory,
    )
    train(config)
    start, end = read_state(before), read_state(tmp_path / "run" / "store")
    for key in end:
        if key.endswith("/master"):
            assert (start[key] != end[key]).any(), key
            second = as_float(end, key.replace("/master", "/exp_avg_sq"))
            assert (second > 0).any(), key


def test_the_bytes_that_move_are_those_of_the_plan(tmp_path):
    model = wide_llama(tmp_path / "model", tie=True)
    data = token_rows(tmp_path / "rows.jsonl", vocab=1500)
    for name, memory in MIXES.items():
        seen: Quiet = train(run_config(model, data, tmp_path / name, **memory))
        assert seen.plan
        for tier in (Tier.PINNED, Tier.CXL, Tier.NVME):
            planned = seen.plan.traffic.get(tier)
            row = seen.rows[-1]
            if planned is None:
                assert row["read_bytes"][tier] == row["written_bytes"][tier] == 0
                continue
            assert row["written_bytes"][tier] == planned.written, name
            slack = seen.plan.step.shape.row_extents
            assert planned.read - slack <= row["read_bytes"][tier] <= planned.read, name
