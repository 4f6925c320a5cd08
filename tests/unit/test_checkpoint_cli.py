from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from checkpoint.cli import ErrorGroup
from checkpoint.sizes import format_size, parse_size
from tests.support.hf_cli import run
from tests.support.hf_folders import make_llama
from tests.support.tiering_stores import put
from tiering.store import open_reader, open_writer

HEAVY = ("torch", "transformers", "zarr", "deepspeed")


def modules_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*(m for m in {HEAVY!r} if m in sys.modules))"
    environment = os.environ | {"PYTHONPATH": "."}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    return set(ended.stdout.splitlines()[-1].split())


def test_the_commands_load_nothing_heavy() -> None:
    assert modules_after("import checkpoint.cli") == set()


def test_an_interrupt_while_the_command_line_is_read_is_no_finding() -> None:
    group = ErrorGroup()
    group.params.append(
        click.Option(
            ["--now"], is_flag=True, callback=lambda *_: signal.raise_signal(signal.SIGINT)
        )
    )
    ended = CliRunner().invoke(group, ["--now", "verify"])
    assert ended.exit_code == 130
    assert ended.output == "error: interrupted\n"


def test_looking_at_a_store_loads_nothing_heavy(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    run("convert", tmp_path / "model", tmp_path / "store")
    for arguments in (["inspect"], ["verify", "--deep"], ["export", str(tmp_path / "out")]):
        command, *rest = arguments
        full = [command, str(tmp_path / "store"), *rest]
        code = f"from checkpoint.cli import cli\ncli({full!r}, standalone_mode=False)"
        assert modules_after(code) == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "a", "b", "--layout", "split"), "--layout split: not in this version yet"),
        (("convert", "a", "b", "--layout", "split8"), "--layout split8: not in this version yet"),
        (("export", "a", "b", "--format", "zarr"), "--format zarr: not in this version yet"),
        (("export", "a", "b", "--format", "dcp"), "--format dcp: not in this version yet"),
        (("convert", "a", "b", "--layout", "fp16"), "'fp16' is not one of"),
        (("convert", "a", "b", "--ram", "lots"), "'lots' is no size"),
        (("convert", "a", "b", "--ram", "4KiB"), "the smallest piece needs 57344 B"),
        (("shard", "a"), "nothing to do: give --drive, --tier or --shard-size"),
        (("mend", "a"), "No such command 'mend'"),
        (("export", "a"), "Missing argument 'OUT'"),
    ],
)
def test_wrong_usage_ends_with_code_2_and_a_sentence(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run(*arguments, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_a_store_in_use_can_be_looked_at_and_says_by_whom(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    run("convert", tmp_path / "model", tmp_path / "store")
    with open_writer(tmp_path / "store", run_id="spring"):
        report = json.loads(run("inspect", "--json", tmp_path / "store").stdout)
        assert f"pid {os.getpid()}" in report["holder"]
        assert "spring" in report["holder"]
        run("verify", "--deep", tmp_path / "store")
    assert json.loads(run("inspect", "--json", tmp_path / "store").stdout)["holder"] is None


def test_inspect_shows_units_roles_drives_and_origin(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model")
    store = tmp_path / "store"
    converted = json.loads(run("convert", "--json", tmp_path / "model", store).stdout)
    report = json.loads(run("inspect", "--json", store).stdout)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    assert report["parameters"] == converted["parameters"] == parameters
    assert report["ledger"] == converted["ledger"]
    assert report["ledger"]["sources"] == [
        {"name": "model.safetensors", "tensors": 21, "nbytes": 2 * parameters}
    ]
    assert [unit["unit"] for unit in report["units"]] == [
        "outer_in", "layer.000", "layer.001", "outer_out"
    ]  # fmt: skip
    assert [role["role"] for role in report["units"][0]["roles"]] == [
        "weights", "master", "exp_avg", "exp_avg_sq"
    ]  # fmt: skip
    assert (report["generation"], report["step"]) == (1, 0)
    (drive,) = report["drives"]
    assert drive["allocated_nbytes"] < drive["nbytes"]  # moments are holes
    shown = run("inspect", store).stdout
    assert "layer.000 to layer.001" in shown
    assert "model.safetensors: 21 tensors" in shown


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        ("5GB", 5 * 10**9),
        ("1.5KiB", 1536),
        ("3B", 3),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e3", "5 GiB of RAM", "0x10", "1,000"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (14 << 40, "14.0 TiB")],
)
def test_sizes_are_written_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_inspect_names_the_readers_of_each_generation_and_the_age_of_the_commit(
    tmp_path: Path,
) -> None:
    make_llama(tmp_path / "model")
    store = tmp_path / "store"
    run("convert", tmp_path / "model", store)
    with open_reader(store):
        with open_writer(store) as writer:
            writer.ensure_slots(2)
            slot = writer.begin()
            tables = {
                record.name: put(writer, slot, record, np.zeros(record.nbytes, np.uint8))
                for record in writer.records.values()
            }
            writer.commit(step=1, train_state={}, checksums=tables)
        report = json.loads(run("inspect", "--json", store).stdout)
        assert report["dropped"] == [{"generation": 1, "readers": [os.getpid()]}]
        assert [line["readers"] for line in report["generations"]] == [[]]
        assert 0 <= report["age_s"] < 600
        said = run("inspect", store).stdout
        assert f"dropped generation 1 is still read by pid {os.getpid()}; last commit" in said
    with open_reader(store):
        assert f"2 (step 1, read by pid {os.getpid()})" in run("inspect", store).stdout
