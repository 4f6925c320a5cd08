"""What is not finite never reaches a generation, and costs no good step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkpoint.verify import verify
from megatrain import run
from megatrain.trainer import Stop
from megatrain.update import DivergedError
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
from tiering.errors import RefusedError
from tiering.store import open_reader

PLACES = {
    "disk": {"memory__resident": 1, "memory__gradients": "disk"},
    "ram": {"memory__resident": 1 << 30},
}


@pytest.fixture(scope="module", name="inputs")
def _inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_llama(folder / "model"), token_rows(folder / "rows.jsonl")


@pytest.mark.parametrize("places", PLACES)
def test_a_master_that_becomes_infinite_ends_the_run_and_is_not_committed(inputs, tmp_path, places):
    """The warm-up's first rate is 0; the second makes the decay overflow."""
    huge = {"train__lr": 1e30, "train__weight_decay": 1e20, "train__warmup_steps": 2}
    config = run_config(*inputs, tmp_path / "run", **huge, **PLACES[places])
    with pytest.raises(
        DivergedError, match=r"^model\.[a-z_.0-9]+\.weight .* update of step 2"
    ) as e:
        train(config)
    assert e.value.exit_code == 3
    assert verify(tmp_path / "run" / "store", deep=True).ok
    with open_reader(tmp_path / "run" / "store") as reader:
        assert reader.manifest.step == 1
    sets = ("train.lr=1e-3", "train.weight_decay=0")
    assert run.resume(tmp_path / "run", sets, Quiet(), Stop(), allow_changes=True).finished


def poisoned(folder: Path) -> Path:
    """A model whose embedding of token 95 is infinite."""
    import torch
    from safetensors.torch import load_file, save_file

    file = tiny_llama(folder) / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    tensors["model.embed_tokens.weight"][95] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def rows(path: Path, good: int, bad: int) -> Path:
    lines = [[3, 4, 5, 6 + i] for i in range(4 * good)] + [[95, 3, 4, 5]] * 4 * bad
    path.write_text("".join(f'{{"input_ids": {x}, "labels": {x}}}\n' for x in lines))
    return path


@pytest.mark.parametrize("places", PLACES)
def test_good_steps_are_committed_before_a_run_gives_up(tmp_path, places, caplog):
    model, data = poisoned(tmp_path / "model"), rows(tmp_path / "rows.jsonl", good=4, bad=4)
    every = {"data__shuffle": False, "train__steps": 9, "train__max_skipped": 2, **PLACES[places]}
    states = {}
    for cadence in (1, 3):
        out = tmp_path / str(cadence)
        config = run_config(model, data, out, store__commit_every=cadence, **every)
        with pytest.raises(RefusedError, match=r"3 steps in a row .* the store is at step 4"):
            train(config)
        assert verify(out / "store", deep=True).ok
        with open_reader(out / "store") as reader:
            assert reader.manifest.step == 4
            states[cadence] = dict(reader.manifest.train_state), read_state(out / "store")
            assert reader.manifest.train_state["cursor"] == 16
            assert reader.manifest.train_state["skipped"] == 0
        assert [row["step"] for row in numbers(out)] == [1, 2, 3, 4]
    assert differing(states[1][1], states[3][1]) == []
    assert states[1][0]["updates"] == states[3][0]["updates"] == 4
    assert re.search(r"skipped a step .* gradient of (lm_head|model\.norm)\.weight, ", caplog.text)


def test_a_data_error_in_the_middle_costs_no_good_step(tmp_path, inputs, monkeypatch):
    from megatrain.data.batches import Batches

    window = Batches.window

    def broken(self, cursor):
        if cursor >= 8:
            raise RefusedError("the data cannot be read any more")
        return window(self, cursor)

    monkeypatch.setattr(Batches, "window", broken)
    config = run_config(*inputs, tmp_path / "run", train__steps=9, store__commit_every=5)
    with pytest.raises(RefusedError, match="cannot be read any more"):
        train(config)
    with open_reader(tmp_path / "run" / "store") as reader:
        assert reader.manifest.step == 2
