"""The commands shard, attach and inspect as a user gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.hf_cli import run
from tests.support.hf_folders import assert_same, load_folder, make_llama
from tiering.store import open_reader, open_writer


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Path:
    make_llama(tmp_path / "model")
    for name in "pqr":
        (tmp_path / name).mkdir()
    run("convert", tmp_path / "model", tmp_path / "store", "--drive", tmp_path / "p")
    return tmp_path / "store"


def test_several_drives_are_measured_and_said_at_creation(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    drives: list[object] = []
    for name in "pq":
        (tmp_path / name).mkdir()
        drives += ["--drive", tmp_path / name]
    said = run("convert", tmp_path / "model", tmp_path / "store", *drives).stderr.splitlines()
    assert [line.split(":")[0].split("/megatrain-")[0] for line in said] == [
        f"drive 0 {tmp_path}/p",
        f"drive 1 {tmp_path}/q",
    ]
    assert all(" GB/s, takes " in line for line in said)


def test_a_store_is_moved_looked_at_and_moved_back_inside(store: Path, tmp_path: Path) -> None:
    moved = run("shard", store, "--drive", tmp_path / "q", "--drive", tmp_path / "r")
    assert f"{store}: on 2 drives ({tmp_path}/q/megatrain-" in moved.stdout
    assert "holds nothing of it any more" in moved.stdout
    lines = json.loads(run("inspect", store, "--json").stdout)["drives"]
    assert sum(line["share"] for line in lines) == pytest.approx(1, abs=0.001)
    assert sum(line["files"] for line in lines) == len(list(store.glob("slots/0/*/c/*")))
    table = run("inspect", store).stdout
    assert all(f"{100 * line['share']:.1f} %" in table for line in lines)
    document = json.loads(run("shard", store, "--drive", store, "--json").stdout)
    assert [drive["folder"] for drive in document["moved"]["drives"]] == [f"{store}/shards"]
    assert document["moved"]["files"] > 0
    assert document["recoded"] is None
    assert len(document["moved"]["dropped"]) == 2
    assert not list((tmp_path / "q").iterdir())
    run("verify", "--deep", store)


def test_an_encoded_store_moves_too_and_a_moved_one_is_encoded(store: Path, tmp_path: Path) -> None:
    wanted = load_folder(tmp_path / "model")
    two = ("--drive", tmp_path / "q", "--drive", tmp_path / "r")
    run("shard", store, *two, "--tier", "zarr")
    run("verify", "--deep", store)
    with open_writer(store) as writer:
        writer.ensure_slots(2)
    run("shard", store, "--drive", tmp_path / "p", "--drive", tmp_path / "q")
    run("verify", "--deep", store)
    assert not list((tmp_path / "r").iterdir())
    run("shard", store, "--drive", tmp_path / "r", "--tier", "nvme")
    run("verify", "--deep", store)
    run("export", store, tmp_path / "out")
    assert_same(load_folder(tmp_path / "out"), wanted)


def test_a_drive_that_moved_is_attached(store: Path, tmp_path: Path) -> None:
    (tmp_path / "p").rename(tmp_path / "elsewhere")
    said = run("verify", store, code=1).stdout
    assert "is its file system mounted?" in said
    assert f"megatrain-ckpt attach {store} --drive" in said
    attached = run("attach", store, "--drive", tmp_path / "elsewhere")
    assert f"{store}: drive 0 is at {tmp_path}/elsewhere/megatrain-" in attached.stdout
    run("verify", "--deep", store)
    document = json.loads(run("attach", store, "--drive", tmp_path / "elsewhere", "--json").stdout)
    assert document["drives"][0]["drive"] == 0


def test_a_store_in_use_ends_with_code_4(store: Path, tmp_path: Path) -> None:
    with open_reader(store):
        assert "is being read by pid" in run(
            "shard", store, "--drive", tmp_path / "q", code=4
        ).stderr  # fmt: skip
    with open_writer(store):
        for command in ("shard", "attach"):
            run(command, store, "--drive", tmp_path / "p", code=4)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("shard", "store"), 2, "nothing to do: give --drive, --tier or --shard-size"),
        (("shard", "store", "--codec", "zstd"), 2, "add --tier zarr"),
        (("shard", "store", "--drive", "absent"), 3, "absent: no such folder; nothing is created"),
        (("shard", "absent", "--drive", "q"), 3, "absent: no store: the path does not exist"),
        (("attach", "store"), 2, "Missing option '--drive'"),
        (("attach", "store", "--drive", "q"), 3, "q: no drive.json there, nor in a folder inside"),
        (("attach", "absent", "--drive", "q"), 3, "absent: no store"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(store.parent)
    assert message in run(*arguments, code=code).stderr
