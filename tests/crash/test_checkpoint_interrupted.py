"""Conversions and exports that do not reach their end."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.convert import convert
from checkpoint.export import export_hf
from tests.support.children import Children
from tests.support.hf_cli import run
from tests.support.hf_folders import Tensors, assert_same, load_folder, make_llama
from tests.support.power_cut_files import Contents, contents
from tiering import fsops
from tiering.errors import StorageError


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    return make_llama(tmp_path / "model")


def fail_at(number: int) -> Callable[[str, Path], None]:
    """Return an observer that fails the step of that number."""
    count = 0

    def observe(action: str, path: Path) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise OSError(28, os.strerror(28))

    return observe


def count_steps(work: Callable[[], object]) -> int:
    steps = []
    with fsops.observed(lambda action, path: steps.append(action)):
        work()
    return len(steps)


def kill_half_way(what: str, source: str, target: str) -> None:
    """Convert or export, and be killed in the middle."""

    def die(done: int, total: int) -> None:
        if done > total / 2:
            os.kill(os.getpid(), signal.SIGKILL)

    {"convert": convert, "export": export_hf}[what](Path(source), Path(target), on_progress=die)


def assert_killed(children: Children, what: str, source: Path, target: Path) -> None:
    command = ["tests.crash.test_checkpoint_interrupted:kill_half_way", what, source, target]
    ended = children.run(command)
    assert (ended.code, ended.hung) == (-signal.SIGKILL, False), ended.err


def test_no_failing_step_of_a_conversion_leaves_something_that_opens(
    tmp_path: Path, tensors: Tensors
) -> None:
    total = count_steps(lambda: convert(tmp_path / "model", tmp_path / "first"))
    for number in range(1, total + 1, 7):
        store = tmp_path / "store"
        with fsops.observed(fail_at(number)), pytest.raises(StorageError):
            convert(tmp_path / "model", store)
        if (store / "zarr.json").exists():  # failed after the commit: then it is whole
            run("verify", "--deep", store)
            store.rename(tmp_path / f"whole {number}")
        else:
            run("verify", store, code=3)
    run("convert", tmp_path / "model", store)
    run("export", store, tmp_path / "out")
    assert_same(load_folder(tmp_path / "out"), tensors)


def test_a_killed_conversion_is_no_store_and_can_be_run_again(
    tmp_path: Path, tensors: Tensors, children: Children
) -> None:
    store, drive = tmp_path / "store", tmp_path / "drive"
    drive.mkdir()
    assert_killed(children, "convert", tmp_path / "model", store)
    assert store.exists()
    for command in ("inspect", "verify"):
        result = run(command, store, code=3)
        assert "create it again" in result.stderr
    run("convert", tmp_path / "model", store, "--drive", drive)
    run("verify", "--deep", store)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, tensors: Tensors) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    drive = tmp_path / "drive"
    drive.mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "model", tmp_path / "store", drives=[drive], on_progress=interrupt)
    assert not (tmp_path / "store").exists()
    assert list(drive.iterdir()) == []


def test_no_failing_step_of_an_export_leaves_anything(tmp_path: Path, tensors: Tensors) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    convert(tmp_path / "model", store)
    total = count_steps(lambda: export_hf(store, tmp_path / "first", max_shard_size=20_000))
    for number in range(1, total + 1):
        with fsops.observed(fail_at(number)), pytest.raises(StorageError):
            export_hf(store, out, max_shard_size=20_000)
        assert not out.exists()
        assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "no exchange here"])
def test_a_failing_export_leaves_the_old_folder_or_the_new(
    tmp_path: Path, tensors: Tensors, exchange: bool
) -> None:
    """Also where the file system cannot exchange names; NFS and many FUSE cannot."""
    store, out = tmp_path / "store", tmp_path / "out"
    convert(tmp_path / "model", store)

    def export(fail: fsops.Observer, **options: Any) -> None:
        def observe(action: str, path: Path) -> None:
            fail(action, path)
            if action == "exchange" and not exchange:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        with fsops.observed(observe):
            export_hf(store, out, overwrite=True, **options)

    def export_old() -> Contents:
        export(lambda *_: None)
        return contents(out)

    old, steps = export_old(), []
    export(lambda action, _: steps.append(action), max_shard_size=20_000)
    new = contents(out)
    assert new != old == export_old()
    for number, step in enumerate(steps, start=1):
        with pytest.raises(StorageError):
            export(fail_at(number), max_shard_size=20_000)
        found = contents(out)
        assert found == old or (found == new and step.startswith("remove")), f"{step} {number}"
        assert not list(tmp_path.glob(".out*")), f"{step} {number}"
        if found == new:
            export_old()


def test_a_killed_export_leaves_the_name_free(
    tmp_path: Path, tensors: Tensors, children: Children
) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    convert(tmp_path / "model", store)
    assert_killed(children, "export", store, out)
    assert not out.exists()
    export_hf(store, out)
    assert_same(load_folder(out), tensors)
