"""Where a run lies, and what is left where it was refused."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from checkpoint.recode import Cut, recode
from megatrain import run, stores
from megatrain.ckpt_cli import cli as ckpt
from megatrain.cli import cli
from megatrain.config import RunConfig
from megatrain.trainer import Stop
from tests.support.runs import Quiet, numbers, run_config, tiny_llama, token_rows, train
from tiering.attaching import attach_drives
from tiering.errors import RefusedError

Inputs = tuple[Path, Path]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_llama(folder / "model"), token_rows(folder / "rows.jsonl")


def begun(config: RunConfig, *, until: int = 1) -> RunConfig:
    stop = Stop()
    run.train(config, Quiet(lambda row: row["step"] == until and stop.request()), stop)
    return config


def resume(place: Path, *sets: str, **options: Any) -> run.Outcome:
    return run.resume(place, sets, Quiet(), Stop(), **options)


def steps(out: Path) -> list[int]:
    return [row["step"] for row in numbers(out)]


MOVES: dict[str, Callable[[Path, Path], object]] = {
    "moved": shutil.move,
    "copied": functools.partial(shutil.copytree, symlinks=True),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("place", [".", "store"])
def test_a_run_goes_on_where_it_was_moved_or_copied_to(tmp_path, inputs, move, place):
    config = begun(run_config(*inputs, tmp_path / "old"))
    move(config.out, tmp_path / "new")
    outcome = resume(tmp_path / "new" / place)
    assert outcome.finished
    assert outcome.out == tmp_path / "new"
    assert outcome.store == tmp_path / "new" / "store"
    assert steps(tmp_path / "new") == [1, 2, 3]
    assert not config.out.exists() or steps(config.out) == [1]
    assert stores.read_run_file(tmp_path / "new").out == tmp_path / "new"


def test_a_moved_folder_of_a_run_leads_to_the_store_outside_it(tmp_path, inputs):
    first = run_config(*inputs, tmp_path / "first")
    train(first)
    store = tmp_path / "first" / "store"
    shutil.move(store, tmp_path / "store")
    begun(run_config(tmp_path / "store", inputs[1], tmp_path / "old"))
    shutil.move(tmp_path / "old", tmp_path / "new")
    outcome = resume(tmp_path / "new")
    assert (outcome.store, outcome.out) == (tmp_path / "store", tmp_path / "new")
    assert steps(tmp_path / "new") == [1, 2, 3]


def test_the_folder_of_an_earlier_run_keeps_its_rows(tmp_path, inputs):
    first = run_config(*inputs, tmp_path / "first")
    train(first)
    store = first.out / "store"
    second = begun(run_config(store, inputs[1], tmp_path / "second"))
    with pytest.raises(RefusedError, match=f"has the run of {second.out} now"):
        resume(first.out)
    outcome = resume(store)
    assert (outcome.store, outcome.out) == (store, second.out)
    assert steps(first.out) == steps(second.out) == [1, 2, 3]


def test_going_back_to_the_end_of_a_shorter_run_drops_the_rows_of_the_longer(tmp_path, inputs):
    config = run_config(*inputs, tmp_path / "run", store__retain=3)
    train(config)
    resume(config.out, "train.steps=5", allow_changes=True)
    assert resume(config.out, generation=4).finished
    assert steps(config.out) == [1, 2, 3]


def test_a_copy_that_shares_its_shards_is_refused(tmp_path, inputs):
    (tmp_path / "drive").mkdir()
    drives = [str(tmp_path / "drive")]
    config = begun(run_config(*inputs, tmp_path / "old", store__drives=drives))
    shutil.copytree(config.out, tmp_path / "new", symlinks=True)
    with pytest.raises(RefusedError, match=r"new/store is a copy of .*old/store, and both"):
        resume(tmp_path / "new")
    shutil.rmtree(config.out)  # then it is the only one, as far as can be seen
    with pytest.raises(RefusedError, match=r"old/store, which is not there now"):
        resume(tmp_path / "new")
    attach_drives(tmp_path / "new" / "store", [tmp_path / "drive"])
    assert resume(tmp_path / "new").out == tmp_path / "new"


def test_the_rows_of_an_earlier_run_are_noticed_before_the_conversion(tmp_path, inputs):
    config = run_config(*inputs, tmp_path / "run")
    config.out.mkdir()
    (config.out / stores.METRICS_FILE).write_text('{"step": 1}\n')
    with pytest.raises(RefusedError, match=r"has the metrics\.jsonl of an earlier run"):
        train(config)
    assert [path.name for path in config.out.iterdir()] == [stores.METRICS_FILE]


FIXED = {
    "out": "/elsewhere",
    "model": "/elsewhere",
    "store.drives": "[/elsewhere]",
    "store.tier": "zarr",
    "store.codec": "zstd",
}


@pytest.mark.parametrize(("key", "value"), FIXED.items())
def test_what_a_resumed_run_keeps_is_not_set(tmp_path, inputs, key, value):
    config = begun(run_config(*inputs, tmp_path / "run"))
    with pytest.raises(RefusedError, match=f"a resumed run keeps its {key}"):
        resume(config.out, f"{key}={value}", allow_changes=True)


def test_another_split_of_the_same_batch_is_told(tmp_path, inputs, caplog):
    config = begun(run_config(*inputs, tmp_path / "run", train__micro_batch=1, train__accumulate=4))
    assert resume(config.out, "train.micro_batch=2", "train.accumulate=2").finished
    assert "differ in their last bits" in caplog.text


def test_data_that_only_moved_is_the_same_data(tmp_path, inputs):
    config = begun(run_config(*inputs, tmp_path / "run"))
    moved = shutil.copy(inputs[1], tmp_path / "moved.jsonl")
    other = token_rows(tmp_path / "other.jsonl", seed=2)
    with pytest.raises(RefusedError, match=r"another run:\n  data\.train.*sha256"):
        resume(config.out, f"data.train={other}")
    assert resume(config.out, f"data.train={moved}").finished


@pytest.mark.parametrize("content", ["", '{"model": "m", "ou', "{}", "[]"])
def test_a_torn_run_file_is_named(tmp_path, inputs, content):
    config = begun(run_config(*inputs, tmp_path / "run"))
    (config.out / stores.RUN_FILE).write_text(content)
    result = CliRunner().invoke(ckpt, ["resume", str(config.out)])
    assert result.exit_code == 3, result.output
    assert f"{config.out / stores.RUN_FILE}: not the settings of a run" in result.stderr
    assert resume(config.out / "store").out == config.out


def test_settings_that_a_kill_left_unfinished_are_in_nobodys_way(tmp_path, inputs):
    config = run_config(*inputs, tmp_path / "run")
    config.out.mkdir()
    (config.out / f"{stores.RUN_FILE}.new").write_text('{"model": "m", "ou')
    stores.write_run_file(config)
    assert stores.read_run_file(config.out) == config
    assert [path.name for path in config.out.iterdir()] == [stores.RUN_FILE]


def test_a_store_that_is_there_keeps_its_drives(tmp_path, inputs):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    drives = [str(tmp_path / "a")]
    train(run_config(*inputs, tmp_path / "first", store__drives=drives))
    store = tmp_path / "first" / "store"
    train(run_config(store, inputs[1], tmp_path / "second", store__drives=drives))
    other = run_config(store, inputs[1], tmp_path / "third", store__drives=[str(tmp_path / "b")])
    with pytest.raises(RefusedError, match=r"store\.drives: .* is there already, on .*/a; "):
        train(other)
    assert not other.out.exists()


def test_a_store_that_is_there_keeps_its_tier(tmp_path, inputs):
    train(run_config(*inputs, tmp_path / "first", store__tier="zarr", store__codec="zstd"))
    store, data = tmp_path / "first" / "store", inputs[1]
    train(run_config(store, data, tmp_path / "second", store__tier="zarr"))
    train(run_config(store, data, tmp_path / "third"))
    for key, value in (("tier", "nvme"), ("codec", "blosc-lz4-bitshuffle")):
        other = run_config(
            store, data, tmp_path / "fourth", **{"store__tier": "zarr", f"store__{key}": value}
        )
        with pytest.raises(RefusedError, match=r"store\.tier: .* other shards \(zstd\); leave"):
            train(other)
        assert not other.out.exists()
    recode(store, Cut(codec=""))
    train(run_config(store, data, tmp_path / "fourth", store__tier="nvme"))


def test_a_stop_during_the_conversion_ends_it_and_leaves_nothing(tmp_path, inputs, monkeypatch):
    from megatrain import progress

    def stop(terminal: progress.Terminal, done: int, total: int) -> None:
        stopping[-1].request()

    stopping: list[Stop] = []
    init = Stop.__init__
    monkeypatch.setattr(Stop, "__init__", lambda self: (init(self), stopping.append(self))[0])
    monkeypatch.setattr(progress.Terminal, "on_converted", stop)
    config = run_config(*inputs, tmp_path / "deep" / "run")
    path = tmp_path / "run.yaml"
    path.write_text(config.to_json())
    result = CliRunner().invoke(cli, ["train", str(path)])
    assert result.exit_code == 130, result.output
    assert "resume" not in result.output
    assert not (tmp_path / "deep").exists()


def test_a_run_stopped_before_its_first_step_is_started_again(tmp_path, inputs):
    class Asking(Quiet):
        def on_plan(self, *_: object) -> None:
            stop.request()

    config, stop = run_config(*inputs, tmp_path / "run"), Stop()
    assert run.train(config, Asking(), stop).step == 0
    train(config)
    assert steps(config.out) == [1, 2, 3]


@pytest.mark.parametrize("drives", [["/no/such/folder"], [".", "."]], ids=["missing", "twice"])
def test_a_refused_conversion_leaves_no_folder(tmp_path, inputs, drives):
    config = run_config(*inputs, tmp_path / "deep" / "run", store__drives=drives)
    with pytest.raises(RefusedError, match="drive "):
        train(config)
    assert not (tmp_path / "deep").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, inputs):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RefusedError, match=r"out: .*file/run cannot be a folder"):
        train(run_config(*inputs, tmp_path / "file" / "run"))
    assert (tmp_path / "file").read_text() == "mine"


def test_only_a_finished_conversion_of_the_same_folder_is_used_again(tmp_path, inputs):
    config, stop = run_config(*inputs, tmp_path / "run"), Stop()
    stop.request()
    with pytest.raises(KeyboardInterrupt):
        run.train(config, Quiet(), stop)
    begun_again = Stop()
    with pytest.raises(ZeroDivisionError):
        run.train(config, Quiet(lambda row: 1 / 0), begun_again)  # converted, nothing committed
    other = config.model_copy(update={"model": tiny_llama(tmp_path / "other")})
    with pytest.raises(RefusedError, match="not known to be made from"):
        train(other)
    (config.out / stores.RUN_FILE).write_text(other.to_json())  # as of a run that lost a race
    with pytest.raises(RefusedError, match="not known to be made from"):
        train(other)
    origin = json.loads((config.out / stores.CONVERTED_FILE).read_bytes())
    assert origin["model"] == str(inputs[0])
