"""Loss and norm of windows whose samples differ in length, or have nothing to learn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.convert import convert
from megatrain import run
from megatrain.trainer import Stop
from tests.support.runs import (
    Quiet,
    as_float,
    differing,
    read_state,
    run_config,
    tiny_llama,
    train,
)
from tiering.errors import RefusedError
from tiering.store import open_reader


def rows_of(path: Path, rows: list[dict[str, list[int]]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def unequal(path: Path, count: int) -> Path:
    generator = torch.Generator().manual_seed(1)
    lengths = (3, 60, 5, 17, 40)
    rows = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
    return rows_of(path, [{"input_ids": r, "labels": r} for r in rows[:count]])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def one_by_four(model: Path, data: Path, out: Path, **changes: object):
    settings = {"train__micro_batch": 1, "train__accumulate": 4, "data__shuffle": False} | changes
    return run_config(model, data, out, **settings)


def test_the_loss_is_the_mean_over_all_target_tokens_of_the_window(tmp_path, model):
    data = unequal(tmp_path / "rows.jsonl", 4)
    row = train(one_by_four(model, data, tmp_path / "run", train__steps=1)).rows[0]
    assert row["targets"] == 81
    assert row["loss"] == pytest.approx(4.58476, abs=1e-4)
    assert row["grad_norm"] == pytest.approx(0.9782, abs=1e-4)


def test_the_last_window_of_an_epoch_is_divided_by_its_own_tokens(tmp_path, model):
    data = unequal(tmp_path / "rows.jsonl", 5)
    # no learning rate: the second window is seen from the start weights
    seen = train(one_by_four(model, data, tmp_path / "run", train__steps=3, train__lr=0.0))
    tail = seen.rows[1]
    assert (tail["samples"], tail["targets"]) == (1, 39)
    assert tail["loss"] == pytest.approx(4.54925, abs=1e-4)
    assert tail["grad_norm"] == pytest.approx(1.3915, abs=1e-4)
    assert (seen.rows[2]["epoch"], seen.rows[2]["samples"]) == (1, 4)


IDS = list(range(3, 43))
MASKED = {"input_ids": IDS, "labels": [-100] * 40}
GOOD = {"input_ids": IDS, "labels": [-100] * 33 + IDS[33:]}


def two_at_a_time(model: Path, data: Path, out: Path, **changes: object):
    return one_by_four(model, data, out, train__accumulate=2, **changes)


def test_a_sample_without_labels_adds_nothing_to_the_window(tmp_path, model, caplog):
    both = rows_of(tmp_path / "both.jsonl", [MASKED, GOOD])
    alone = rows_of(tmp_path / "alone.jsonl", [GOOD])
    a = train(two_at_a_time(model, both, tmp_path / "a", train__steps=2)).rows
    b = train(two_at_a_time(model, alone, tmp_path / "b", train__steps=2)).rows
    for left, right in zip(a, b, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-6)
        assert left["targets"] == 7
    assert any("1 had no label" in record.message for record in caplog.records)


def test_a_window_without_labels_makes_no_step(tmp_path, model):
    data = rows_of(tmp_path / "rows.jsonl", [MASKED, MASKED, GOOD, GOOD])
    rows = train(two_at_a_time(model, data, tmp_path / "run", train__steps=2)).rows
    only = rows_of(tmp_path / "only.jsonl", [GOOD, GOOD])
    plain = train(two_at_a_time(model, only, tmp_path / "plain", train__steps=2)).rows
    assert [row["skipped"] for row in rows] == [1, 2]
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain]
    assert (
        differing(read_state(tmp_path / "run" / "store"), read_state(tmp_path / "plain" / "store"))
        == []
    )


def test_data_without_any_label_is_refused_before_anything_is_converted(tmp_path, model):
    data = rows_of(tmp_path / "rows.jsonl", [MASKED] * 4)
    with pytest.raises(RefusedError, match="none of 4 samples has a label"):
        train(two_at_a_time(model, data, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def poisoned(folder: Path, token: int) -> Path:
    """A model whose embedding of one token is infinite."""
    from safetensors.torch import load_file, save_file

    tiny_llama(folder, attention_dropout=0.3)
    file = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    tensors["model.embed_tokens.weight"][token] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


TIERS = {
    "ram": {},
    "nvme": {"memory__resident": 1, "memory__gradients": "disk"},
    "zarr": {"memory__resident": 1, "store__tier": "zarr"},
}


@pytest.mark.parametrize("tier", TIERS)
def test_a_step_that_is_not_finite_changes_nothing(tmp_path, tier, caplog):
    """Nor what follows: its window is used up, the next takes its number, rate and dropout."""
    model = poisoned(tmp_path / "poisoned", token=50)
    settings = {"train__steps": 3, "train__schedule": "cosine", "train__weight_decay": 0.1}
    fine = [{"input_ids": IDS[i:], "labels": IDS[i:]} for i in range(6)]
    bad = {"input_ids": [50, 51, 52], "labels": [50, 51, 52]}
    both = rows_of(tmp_path / "both.jsonl", [*fine[:2], bad, fine[0], *fine[2:]])
    rows = train(two_at_a_time(model, both, tmp_path / "run", **settings, **TIERS[tier])).rows
    good = rows_of(tmp_path / "good.jsonl", fine)
    plain = train(two_at_a_time(model, good, tmp_path / "plain", **settings)).rows
    assert [row["skipped"] for row in rows] == [0, 1, 1]
    for row, expected in zip(rows, plain, strict=True):
        assert [row[key] for key in SAME] == [expected[key] for key in SAME]
    said = [r.message for r in caplog.records if "skipped a step" in r.message]
    assert len(said) == 1
    assert re.match(r"skipped a step after step 1: loss nan, gradient of \S+\.weight, ", said[0])
    stores = [tmp_path / "run/store", tmp_path / "plain/store"]
    assert differing(*map(read_state, stores)) == []
    states = [train_state(store) for store in stores]
    assert [states[0][key] for key in COUNTS] == [states[1][key] for key in COUNTS] == [3, 3, {}]
    assert (states[0]["skipped"], states[0]["cursor"], states[1]["cursor"]) == (1, 8, 6)


SAME = ("step", "loss", "grad_norm", "lr")
COUNTS = ("step", "updates", "updates_of")


def train_state(store: Path) -> Mapping[str, Any]:
    with open_reader(store) as reader:
        return reader.manifest.train_state


def test_a_run_that_is_never_finite_gives_up_and_keeps_what_was_committed(tmp_path):
    model = poisoned(tmp_path / "poisoned", token=50)
    bad = {"input_ids": [50, 51, 52], "labels": [50, 51, 52]}
    data = rows_of(tmp_path / "rows.jsonl", [bad] * 4)
    config = two_at_a_time(model, data, tmp_path / "run", train__max_skipped=2)
    with pytest.raises(RefusedError, match="3 steps in a row changed nothing") as caught:
        train(config)
    assert caught.value.exit_code == 3
    with open_reader(tmp_path / "run" / "store") as reader:
        assert reader.manifest.step == 0


def test_norm_weights_move_in_the_master_though_bf16_would_round_the_step_away(tmp_path, model):
    data = unequal(tmp_path / "rows.jsonl", 4)
    config = one_by_four(
        model, data, tmp_path / "run", train__dtype="bfloat16", train__lr=1e-5, train__steps=3
    )
    train(config)
    state = read_state(tmp_path / "run" / "store")
    names = [key for key in state if key.endswith("layernorm.weight/master")]
    assert names
    for key in names:
        assert (as_float(state, key) != 1.0).all(), key


def test_a_store_with_an_unfinished_run_is_not_trained_anew(tmp_path, model):
    data, stop = unequal(tmp_path / "rows.jsonl", 4), Stop()
    config = one_by_four(model, data, tmp_path / "run", train__steps=4)
    run.train(config, Quiet(lambda row: row["step"] == 2 and stop.request()), stop)
    store = tmp_path / "run" / "store"
    other = run_config(store, tmp_path / "rows.jsonl", tmp_path / "other")
    with pytest.raises(RefusedError, match=r"at step 2 of 4.*megatrain-ckpt resume.*export"):
        train(other)


def test_a_finished_store_is_trained_again_with_fresh_moments(tmp_path, model):
    data = unequal(tmp_path / "rows.jsonl", 4)
    store = tmp_path / "store"
    convert(model, store)
    train(one_by_four(store, data, tmp_path / "first", train__steps=1, train__lr=0.0))
    train(one_by_four(store, data, tmp_path / "second", train__steps=1))
    fresh = tmp_path / "fresh"
    convert(model, fresh)
    train(one_by_four(fresh, data, tmp_path / "third", train__steps=1))
    assert differing(read_state(store), read_state(fresh)) == []
