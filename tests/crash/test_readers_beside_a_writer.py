"""Readers while a store is being written: what each of them reads is one generation."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from checkpoint import verify as verify_module
from checkpoint.convert import convert
from checkpoint.export import export_hf
from checkpoint.schema import Layout
from checkpoint.verify import verify
from checkpoint.windows import aligned
from megatrain import run
from megatrain.ckpt_cli import cli as ckpt
from megatrain.cli import cli as megatrain
from megatrain.trainer import Row, Stop
from tests.support import hf_cli
from tests.support.faults import Fault
from tests.support.held_runs import Command, Driver
from tests.support.runs import Quiet, run_config, tiny_llama, token_rows, train
from tests.support.tiering_stores import (
    assert_state,
    fill,
    make_store,
    memory_folder,
    small_chunks,
    small_record,
)
from tiering import lock
from tiering.errors import CorruptionError, RefusedError
from tiering.generations import read_root
from tiering.lock import lock_holder
from tiering.manifest import Root
from tiering.store import open_reader, open_writer

RECORDS = (small_record("a", "float32", 4097), small_record("b", "uint8", 9, codec="zstd"))


@contextmanager
def committing(store: Path, *, spare: int) -> Iterator[int]:
    """Lend the id of a process that commits one state after another, until it is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            with open_writer(store) as writer:
                writer.ensure_slots(2 + spare)
                for seed in itertools.count(2):
                    writer.begin()
                    fill(writer, seed)
        except BaseException:  # noqa: BLE001 - nobody but the other process can see it
            traceback.print_exc()
        os._exit(1)
    try:
        yield pid
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the writer failed, see stderr"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("spare", [0, 1])
def test_every_reader_gets_one_whole_generation_however_often_others_follow(spare: int) -> None:
    with small_chunks(), memory_folder() as folder:
        store = make_store(folder / "store", records=RECORDS)
        seen = set()
        with committing(store, spare=spare):
            while len(seen) < (20 if spare else 5):
                with open_reader(store) as reader:
                    assert reader.manifest.generation == reader.manifest.step
                    assert_state(reader, reader.manifest.step)
                    seen.add(reader.manifest.step)
        with open_reader(store) as reader:
            assert_state(reader, reader.manifest.step)


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="inputs")
def _inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store that was converted, and rows to train on."""
    folder = tmp_path_factory.mktemp("inputs")
    model = tiny_llama(folder / "model", num_hidden_layers=1)
    convert(model, folder / "store", layout=Layout.FLOAT32)
    return folder / "store", token_rows(folder / "rows.jsonl")


@pytest.fixture(name="store")
def _store(inputs: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(inputs[0], tmp_path / "store", symlinks=True)


def training(driver: Driver, store: Path, rows: Path, **changes: Any) -> Command:
    """Start a run of 3 steps that commits each of them."""
    place = store.parent
    config = run_config(store, rows, place / "run", memory__resident=1, **changes)
    (place / "run.yaml").write_text(config.to_json())
    return driver.start(["megatrain", "train", str(place / "run.yaml")], place / "run's talk")


def call(command: str, *arguments: object) -> Result:
    group = megatrain if command == "train" else ckpt
    return CliRunner().invoke(group, [command, *map(str, arguments)])


def document(*arguments: object) -> Any:
    return json.loads(hf_cli.run(*arguments, "--json").stdout)


def test_what_is_exported_while_a_run_commits_every_step_is_the_generation_that_it_names(
    driver: Driver, inputs: tuple[Path, Path], store: Path, tmp_path: Path
) -> None:
    command = training(driver, store, inputs[1], train__steps=1 << 20)
    exported: dict[int, bytes] = {}
    while len(exported) < 4:
        shown = document("inspect", store)
        assert shown["generation"] == shown["step"] + 1
        verified = document("verify", store, "--deep")
        assert verified["ok"], verified["findings"]
        assert len(verified["generations"]) == 1
        number = document("export", store, tmp_path / "out", "--overwrite")["generation"]
        exported[number] = (tmp_path / "out/model.safetensors").read_bytes()
    command.send(signal.SIGINT)
    assert command.exit_code() == 130, command.said

    def compare(row: Row) -> None:
        """When a step is about to be committed, the one before it is the newest."""
        if row["step"] in exported:
            assert export_hf(alone, tmp_path / "out", overwrite=True).generation == row["step"]
            data = (tmp_path / "out/model.safetensors").read_bytes()
            assert data == exported.pop(row["step"])

    alone = shutil.copytree(inputs[0], tmp_path / "alone", symlinks=True)
    assert len(set(exported.values())) == 4
    steps = max(exported)
    train(run_config(alone, inputs[1], tmp_path / "all", train__steps=steps), Quiet(compare))
    assert not exported


SLOW = Fault(op="read", path="/0.layer.000.master.0", count=1, held=True)


def verifying(driver: Driver, store: Path) -> Command:
    """Start to verify the first generation, and stay in the middle of it."""
    arguments = ["megatrain-ckpt", "verify", str(store), "--deep", "--json"]
    command = driver.start(arguments, store.parent / "reader's talk", SLOW)
    command.wait_until_held("read")
    return command


def assert_whole(reader: Command, generation: int) -> None:
    """Let a reader go on; what it reads is still what was committed."""
    reader.let_go("read")
    assert reader.exit_code() == 0, reader.said
    [verified] = json.loads(reader.said)["generations"]
    assert (verified["generation"], verified["ok"]) == (generation, True)


@pytest.mark.parametrize("killed", [True, False])
def test_a_run_waits_for_the_reader_of_the_slot_that_it_needs_and_everybody_is_named(
    driver: Driver, inputs: tuple[Path, Path], store: Path, killed: bool
) -> None:
    reader = verifying(driver, store)
    command = training(driver, store, inputs[1])
    command.wait_for(f"waiting for a slot that is read by pid {reader.pid}\n")

    shown = document("inspect", store)
    assert shown["dropped"] == [{"generation": 1, "readers": [reader.pid]}]
    assert 0 <= shown["age_s"] < 600
    with open_reader(store) as newest:
        run_id = newest.manifest.train_state["run_id"]
    who = rf"pid {command.pid} on {socket.gethostname()} since \S+ \(megatrain run {run_id}\)"
    assert re.fullmatch(who, shown["holder"])
    for refused in (
        call("resume", store),
        call("prune", store, "--yes"),
        call("shard", store, "--drive", store.parent),
        call("train", store.parent / "run.yaml", "--set", f"out={store.parent / 'other'}"),
    ):
        assert refused.exit_code == 4, refused.output
        assert re.search(f"in use by {who}$", refused.stderr.strip())

    if killed:
        reader.send(signal.SIGKILL)
        assert reader.exit_code() == -signal.SIGKILL
    else:
        assert_whole(reader, 1)
    assert command.exit_code() == 0, command.said
    assert read_root(store).latest.step == 3


def test_a_spare_slot_keeps_a_run_from_waiting_for_a_reader(
    driver: Driver, inputs: tuple[Path, Path], store: Path
) -> None:
    reader = verifying(driver, store)
    command = training(driver, store, inputs[1], store__spare_slots=1)
    assert command.exit_code() == 0, command.said
    assert "waiting" not in command.said
    assert read_root(store).latest.step == 3
    assert_whole(reader, 1)


def commit_again(store: Path) -> None:
    """Commit the bytes of the newest generation once more."""
    with open_writer(store) as writer:
        writer.ensure_slots(2)
        before, slot = writer.manifest, writer.begin(wait_s=0)
        for record in writer.records.values():
            data = aligned(record.padded_nbytes).data
            writer.read(before.slot, record.name, 0, data)
            writer.write(slot, record.name, 0, data)
        tables = {name: writer.checksums(name) for name in writer.records}
        writer.commit(step=before.step + 1, train_state={}, checksums=tables)


def test_a_commit_in_the_middle_of_a_look_at_the_root_is_no_damage(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, others = verify_module.store_faults, iter([store])

    def look_late(path: Path, root: Root) -> Iterator[CorruptionError]:
        for other in others:
            commit_again(other)
        return faults(path, root)

    monkeypatch.setattr(verify_module, "store_faults", look_late)
    found = verify(store)
    assert found.ok, found.findings
    assert [item.generation for item in found.generations] == [2]


def after_commits(store: Path, *counts: int) -> Callable[[Path], int | None]:
    """Take holds, each of the first ones after so many commits."""
    hold, left = lock.hold, iter(counts)

    def hold_late(path: Path) -> int | None:
        for _ in range(next(left, 0)):
            commit_again(store)
        return hold(path)

    return hold_late


def test_when_every_generation_is_dropped_meanwhile_the_next_ones_are_verified(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "hold", after_commits(store, 1, 2))
    found = verify(store, deep=True)
    assert [(item.generation, item.ok) for item in found.generations] == [(4, True)]
    monkeypatch.setattr(lock, "hold", after_commits(store, 1))
    with pytest.raises(RefusedError, match=r"no generation 4; there is 5 \(step 4\)"):
        verify(store, generation=4)


def test_a_run_that_goes_on_names_itself_by_the_run_that_it_is(
    inputs: tuple[Path, Path], store: Path, tmp_path: Path
) -> None:
    names, stop = [], Stop()

    def after(row: Row) -> None:
        names.append(lock_holder(store / "LOCK"))
        stop.request()

    run.train(run_config(store, inputs[1], tmp_path / "run"), Quiet(after), stop)
    stop.requested = False
    run.resume(store, (), Quiet(after), stop)
    with open_reader(store) as reader:
        assert reader.manifest.step == 2
        run_id = reader.manifest.train_state["run_id"]
    for name in names:
        assert name is not None
        assert name.endswith(f" run {run_id})")
