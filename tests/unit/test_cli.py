"""The command lines: exit codes, one clear message each, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from megatrain.ckpt_cli import cli as ckpt
from megatrain.cli import cli
from megatrain.progress import Terminal
from tests.support.runs import run_config, tiny_llama, token_rows
from tiering.store import open_writer


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    model, data = tiny_llama(tmp_path / "model"), token_rows(tmp_path / "rows.jsonl")
    path = tmp_path / "run.yaml"  # JSON is YAML
    path.write_text(run_config(model, data, tmp_path / "run").to_json())
    return path


def call(*arguments: object, group=cli) -> Result:
    return CliRunner().invoke(group, [str(a) for a in arguments])


def test_train_then_resume_then_export(tmp_path, run_file):
    result = call("train", run_file)
    assert result.exit_code == 0, result.stderr
    assert "step 3 is committed" in result.stdout
    assert "planned RAM" in result.stderr
    again = call("resume", tmp_path / "run", group=ckpt)
    assert again.exit_code == 0, again.stderr
    out = call("export", tmp_path / "run" / "store", tmp_path / "out", group=ckpt)
    assert out.exit_code == 0, out.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_row_of_metrics_has_what_tools_need(tmp_path, run_file):
    call("train", run_file)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert {"loss", "grad_norm", "lr", "tokens", "step_s"} <= row.keys()
        assert row["read_bytes"].keys() == row["written_bytes"].keys() >= {"pinned", "nvme"}


def refused(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("group", [cli, ckpt])
def test_the_version_is_told(group):
    try:
        expected = version("megatrain")
    except PackageNotFoundError:
        pytest.skip("megatrain is not installed here, so it has no version")
    assert expected in call("--version", group=group).stdout


def test_a_note_is_printed_as_it_is(capsys):
    plan = SimpleNamespace(notes=["ignored [/x] and [bold]"])
    Terminal().on_conversion(plan)
    assert "note: ignored [/x] and [bold]" in capsys.readouterr().err


def test_an_unknown_key_is_answered_with_the_nearest_known_one(tmp_path, run_file):
    result = call("train", run_file, "--set", "train.learning_rte=3")
    refused(result, 2, "train.learning_rte", "unknown key", "train.l")
    assert not (tmp_path / "run").exists()


def test_a_missing_run_file_is_named(tmp_path):
    refused(call("train", tmp_path / "none.yaml"), 2, "none.yaml")


def test_a_folder_without_weights_is_refused(tmp_path, run_file):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(call("train", run_file, "--set", f"model={empty}"), 3, str(empty))
    assert not (tmp_path / "run" / "store").exists()


def test_a_store_in_use_names_its_holder(tmp_path, run_file):
    assert call("train", run_file).exit_code == 0
    store = tmp_path / "run" / "store"
    with open_writer(store, run_id="the other one"):
        result = call("resume", tmp_path / "run", group=ckpt)
        refused(result, 4, "the other one")
        sets = ("--set", f"model={store}", "--set", f"out={tmp_path / 'second'}")
        refused(call("train", run_file, *sets), 4, "the other one")
    assert not (tmp_path / "second").exists()


def test_too_little_memory_is_refused_before_a_byte_is_converted(tmp_path, run_file):
    result = call("train", run_file, "--set", "memory.ram=100KiB")
    refused(result, 3, "memory.ram is 0.1 MiB", "train.micro_batch")
    assert not (tmp_path / "run").exists()


def test_there_is_nothing_to_resume_in_a_folder_without_a_run(tmp_path):
    refused(call("resume", tmp_path, group=ckpt), 3, str(tmp_path))


def test_a_converted_store_has_no_run_to_go_on_with(tmp_path, run_file):
    store = tmp_path / "store"
    assert call("convert", tmp_path / "model", store, group=ckpt).exit_code == 0
    refused(call("resume", store, group=ckpt), 3, "megatrain train")


def test_a_truncated_shard_is_named_with_both_lengths(tmp_path, run_file):
    assert call("train", run_file).exit_code == 0
    store = tmp_path / "run" / "store"
    shards = sorted((store / "shards").glob("*outer_out.master*"))
    assert len(shards) == 2, "one in each slot"
    size = shards[0].stat().st_size
    for shard in shards:
        os.truncate(shard, size - 5)
    result = call("resume", tmp_path / "run", group=ckpt)
    refused(result, 3, "outer_out.master", str(size), str(size - 5))


@pytest.mark.parametrize("module", ["megatrain.cli", "megatrain.ckpt_cli"])
def test_help_does_not_pay_for_torch(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'zarr', 'deepspeed')"
    code += " if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
