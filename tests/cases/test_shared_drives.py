"""Drives that several runs share, and that hold what others, or killed runs, left there."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from megatrain import run
from megatrain.ckpt_cli import cli as ckpt
from megatrain.config import RunConfig
from megatrain.trainer import Row, Stop
from tests.support.runs import (
    Quiet,
    differing,
    read_state,
    run_config,
    tiny_llama,
    token_rows,
    train,
)
from tiering.errors import LockedError
from tiering.labels import LABEL

MODULES = [
    "deepspeed.ops.op_builder",
    "transformers.models.llama.modeling_llama",
    "megatrain.run",
    "tests.support.runs",
]
OTHERS = ("0.bin", "1.bin", LABEL, "0.outer_in.master.0", "megatrain-00000000/0.outer_in.master.0")
NOBODY = 65534


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_llama(folder / "model"), token_rows(folder / "rows.jsonl")


@pytest.fixture(scope="module")
def alone(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the runs of these tests end with when nothing else is on their drive."""
    folder = tmp_path_factory.mktemp("alone")
    found = {}
    for lr in (1e-3, 2e-3):
        train(run_config(*inputs, folder / str(lr), train__lr=lr))
        found[lr] = read_state(folder / str(lr) / "store")
    return found


@pytest.fixture(name="drive")
def _drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def _wait_after_second_step(config: str, started: Any, go: Any) -> None:
    """By then the first one is committed."""

    def wait(row: Row) -> None:
        if row["step"] == 2:
            started.set()
            go.wait(60)

    try:
        run.train(RunConfig.from_json(config), Quiet(wait), Stop())
    finally:
        started.set()


@pytest.fixture(name="live")
def _live(inputs: tuple[Path, Path], drive: Path, tmp_path: Path) -> Iterator[Any]:
    """Lend a run that has committed a step, and what lets it go on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    started, go = context.Event(), context.Event()
    config = run_config(*inputs, tmp_path / "live", store__drives=[str(drive)])
    arguments = (config.to_json(), started, go)
    process = context.Process(target=_wait_after_second_step, args=arguments)
    process.start()
    try:
        assert started.wait(60)
        yield process, go
    finally:
        process.kill()
        process.join()


def _resume(out: Path) -> None:
    run.resume(out, (), Quiet(), Stop())


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def _assert_equal(store: Path, expected: Mapping[str, np.ndarray]) -> None:
    assert differing(expected, read_state(store)) == []


def test_runs_share_a_drive_but_no_store(live, inputs, drive, alone, tmp_path):
    process, go = live
    with pytest.raises(LockedError, match=f"in use by pid {process.pid} on ") as caught:
        _resume(tmp_path / "live")
    assert caught.value.exit_code == 4
    second = run_config(*inputs, tmp_path / "second", train__lr=2e-3, store__drives=[str(drive)])
    train(second)
    go.set()
    process.join(60)
    assert process.exitcode == 0
    _assert_equal(tmp_path / "live/store", alone[1e-3])
    _assert_equal(tmp_path / "second/store", alone[2e-3])
    assert len(list(drive.iterdir())) == 2


def test_what_a_killed_run_leaves_is_taken_over_or_disturbs_nobody(
    live, inputs, drive, alone, tmp_path
):
    process, _go = live
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    linked = {p.resolve() for p in (tmp_path / "live/store").glob("slots/*/*/c/*")}
    left = {path for path in _files(drive) if path.name != LABEL}
    assert left == linked, "scratch files have no name: nothing is left over"
    train(run_config(*inputs, tmp_path / "other", train__lr=2e-3, store__drives=[str(drive)]))
    _assert_equal(tmp_path / "other/store", alone[2e-3])
    _resume(tmp_path / "live")
    _assert_equal(tmp_path / "live/store", alone[1e-3])
    shutil.rmtree(tmp_path / "live")  # now its shards are left over, of a store that is no more
    before = {path: path.read_bytes() for path in _files(drive)}
    train(run_config(*inputs, tmp_path / "live", store__drives=[str(drive)]))
    _assert_equal(tmp_path / "live/store", alone[1e-3])
    assert {path: path.read_bytes() for path in before} == before


def test_files_of_others_on_a_drive_are_neither_read_nor_changed(inputs, drive, alone, tmp_path):
    for name in OTHERS:
        (drive / name).parent.mkdir(exist_ok=True)
        (drive / name).write_bytes(b"\xff" * 12345)
    train(run_config(*inputs, tmp_path / "run", store__drives=[str(drive)]))
    _assert_equal(tmp_path / "run/store", alone[1e-3])
    assert all((drive / name).read_bytes() == b"\xff" * 12345 for name in OTHERS)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in OTHERS:
        (elsewhere / name).parent.mkdir(exist_ok=True)
        (elsewhere / name).write_bytes(b"\xff" * 12345)
    store = tmp_path / "run/store"
    result = CliRunner().invoke(ckpt, ["shard", str(store), "--drive", str(elsewhere)])
    assert result.exit_code == 0, result.output
    _assert_equal(store, alone[1e-3])
    for place in (drive, elsewhere):
        assert all((place / name).read_bytes() == b"\xff" * 12345 for name in OTHERS)
    assert len(list(drive.iterdir())) == len(OTHERS), "what the store had here is gone"


def test_a_drive_that_the_user_may_not_write_is_refused_at_the_start(inputs, alone):
    """As a normal user: root may write everywhere."""
    if os.geteuid() != 0:
        pytest.skip("needs root: to become another user")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shutil.copytree(inputs[0], place / "model")
        shutil.copy(inputs[1], place / "rows.jsonl")
        (place / "drive").mkdir(mode=0o555)
        for path in (place, *place.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        config = run_config(
            place / "model", place / "rows.jsonl", place / "run", store__drives=[f"{place}/drive"]
        )
        said = place / "said"
        pid = os.fork()
        if pid == 0:
            _train_as_nobody(config, said)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert said.read_text() == f"drive {place}/drive: user {_name(NOBODY)} cannot write there"
        assert not (place / "run").exists()


def _train_as_nobody(config: RunConfig, said: Path) -> None:
    from tiering.errors import RefusedError

    code = 1
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        run.train(config, Quiet(), Stop())
    except RefusedError as error:
        said.write_text(str(error))
        code = error.exit_code
    except BaseException:  # noqa: BLE001 - whatever it is, it must be seen
        traceback.print_exc()
    finally:
        os._exit(code)


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@pytest.mark.parametrize("home", ["", "~/"], ids=["relative", "from home"])
def test_a_path_may_hold_anything_and_be_relative(inputs, alone, tmp_path, monkeypatch, home):
    first, second = tmp_path / "mein Über pfad", tmp_path / "Ömer's drive"
    first.mkdir()
    second.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    store = tmp_path / "run/store"
    monkeypatch.chdir(tmp_path)
    train(run_config(*inputs, tmp_path / "run", store__drives=[home + first.name]))
    assert [path.name[:10] for path in first.iterdir()] == ["megatrain-"]
    monkeypatch.chdir("/")
    _assert_equal(store, alone[1e-3])
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(ckpt, ["shard", str(store), "--drive", home + second.name])
    assert result.exit_code == 0, result.output
    monkeypatch.chdir("/")
    _assert_equal(store, alone[1e-3])
    assert max(len(path.name) for path in _files(second)) < 64
