"""A streamed run beside plain transformers and torch's AdamW on the same windows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatrain.data.order import Order
from tests.support.runs import as_float, read_state, run_config, tiny_llama, token_rows, train

STEPS, LR, DECAY, CLIP = 20, 1e-3, 0.1, 0.5


def plain_steps(model_dir: Path, rows: list[list[int]], fingerprint: str):
    """Yield (loss, norm) of each step of plain full-batch training, one sample at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    plain = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    order, cursor = Order(size=len(rows), fingerprint=fingerprint), 0
    for _ in range(STEPS):
        indices, _ = order.window(cursor, 4)
        cursor += len(indices)
        window = [torch.tensor([rows[i]]) for i in indices]
        targets = sum(x.shape[1] - 1 for x in window)
        total = 0.0
        for x in window:
            logits = model(input_ids=x, use_cache=False).logits
            loss = F.cross_entropy(logits[0, :-1], x[0, 1:], reduction="sum") / targets
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
        yield total, norm, model


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("tie", [False, True])
def test_losses_norms_and_masters_equal_plain_training(tmp_path, tie):
    model = tiny_llama(tmp_path / "model", tie=tie)
    data = token_rows(tmp_path / "rows.jsonl")
    config = run_config(
        model,
        data,
        tmp_path / "run",
        train__steps=STEPS,
        train__weight_decay=DECAY,
        train__max_grad_norm=CLIP,
        memory__resident=1,
        memory__gradients="disk",
    )
    rows = train(config).rows
    fingerprint = hashlib.sha256(data.read_bytes()).hexdigest()
    samples = [json.loads(line)["input_ids"] for line in data.read_text().splitlines()]
    for row, (loss, norm, plain) in zip(
        rows, plain_steps(model, samples, fingerprint), strict=True
    ):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    state = read_state(tmp_path / "run" / "store")
    for name, parameter in plain.named_parameters():
        ours = as_float(state, f"{name}/master")
        np.testing.assert_allclose(ours, parameter.detach().numpy().reshape(-1), atol=2e-5)


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-6), ("bfloat16", 1e-3)])
def test_one_by_four_equals_four_by_one(tmp_path, dtype, near):
    model, data = tiny_llama(tmp_path / "m", tie=True), token_rows(tmp_path / "rows.jsonl")
    found = {}
    for micro, accumulate in ((1, 4), (4, 1)):
        out = tmp_path / f"{micro}x{accumulate}"
        config = run_config(
            model,
            data,
            out,
            train__micro_batch=micro,
            train__accumulate=accumulate,
            train__dtype=dtype,
            train__lr=1e-4,
        )
        found[micro] = (train(config).rows, read_state(out / "store"))
    for a, b in zip(found[1][0], found[4][0], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=near)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=near)
    if dtype == "float32":
        for key in found[1][1]:
            if key.endswith("/master"):
                gap = np.abs(as_float(found[1][1], key) - as_float(found[4][1], key)).max()
                assert gap <= 1e-6, key


def test_a_clipped_step_scales_all_gradients_by_the_global_norm(tmp_path):
    model, data = tiny_llama(tmp_path / "m"), token_rows(tmp_path / "rows.jsonl", count=4)
    config = run_config(model, data, tmp_path / "run", train__steps=1, train__max_grad_norm=0.25)
    row = train(config).rows[0]
    assert row["grad_norm"] > 0.25, "the logged norm is the unclipped one"
    state = read_state(tmp_path / "run" / "store")
    moments = [as_float(state, key) for key in state if key.endswith("/exp_avg")]
    norm = np.sqrt(sum(float(np.square(m.astype(np.float64)).sum()) for m in moments))
    assert norm == pytest.approx(0.1 * 0.25, rel=1e-4)
