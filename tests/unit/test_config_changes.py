from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config import RunConfig, changes, load_run


@pytest.fixture
def configure(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\nout: o\ndata: {train: a.jsonl}\ntrain: {micro_batch: 1, accumulate: 4}\n"
    )

    def load(*sets: str) -> RunConfig:
        return load_run(path, sets)

    return load


def summary(old: RunConfig, new: RunConfig, **data: str) -> dict[str, bool]:
    return {change.key: change.harmless for change in changes(old, new, **data)}


def test_equal_settings_have_no_changes(configure):
    assert changes(configure(), configure(), old_data="a", new_data="a") == []


def test_the_same_global_batch_split_otherwise_is_harmless(configure):
    new = configure("train.micro_batch=2", "train.accumulate=2")
    assert summary(configure(), new) == {"train.micro_batch": True, "train.accumulate": True}


def test_another_global_batch_is_not(configure):
    assert summary(configure(), configure("train.micro_batch=2")) == {"train.micro_batch": False}


@pytest.mark.parametrize(
    "setting",
    [
        "model=other",
        "train.steps=200",
        "train.lr=1e-3",
        "train.schedule=linear",
        "train.warmup_steps=3",
        "train.weight_decay=0.1",
        "train.seed=1",
        "train.dtype=float32",
        "train.max_grad_norm=0",
        "train.betas=[0.9, 0.95]",
        "train.loss_chunk=64",
        "data.train=b.jsonl",
        "data.max_seq_len=8",
        "data.shuffle=false",
        "data.skip_bad_lines=true",
    ],
)
def test_what_decides_numbers_is_not_harmless_and_changes_the_digest(configure, setting: str):
    old, new = configure(), configure(setting)
    assert summary(old, new) == {setting.partition("=")[0]: False}
    assert old.digest() != new.digest()


@pytest.mark.parametrize(
    "setting",
    [
        "out=elsewhere",
        "memory.ram=1GiB",
        "memory.gradients=disk",
        "store.drives=[/a]",
        "store.commit_every=5",
        "store.retain=3",
        "train.device=cpu",
        "train.any_family=true",
    ],
)
def test_places_and_budgets_are_harmless_and_leave_the_digest(configure, setting: str):
    old, new = configure(), configure(setting)
    assert summary(old, new) == {setting.partition("=")[0]: True}
    assert old.digest() == new.digest()


def test_the_content_of_the_data_decides_when_it_is_known(configure):
    old, moved = configure(), configure("data.train=b.jsonl")
    assert summary(old, moved, old_data="aa", new_data="aa") == {"data.train": True}
    assert summary(old, old, old_data="aa", new_data="bb") == {"data.train": False}


def test_a_change_reads_as_old_and_new_value(configure):
    (change,) = changes(configure("train.lr=1e-3"), configure("train.lr=5e-4"))
    assert str(change) == "train.lr: 0.001 -> 0.0005"
