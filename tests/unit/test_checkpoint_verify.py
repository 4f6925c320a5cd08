from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.verify import Finding, verify
from tests.support.hf_cli import run
from tests.support.hf_folders import make_llama
from tiering.errors import RefusedError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    make_llama(tmp_path / "model")
    drives = ("--drive", tmp_path / "a", "--drive", tmp_path / "b")
    run("convert", tmp_path / "model", tmp_path / "store", *drives)
    return tmp_path / "store"


def shard_of(store: Path, record: str) -> Path:
    return next(store.glob(f"slots/0/{record}/c/0")).resolve()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_new_store_is_what_was_committed(store: Path) -> None:
    shallow, deep = verify(store), verify(store, deep=True)
    assert shallow.ok
    assert deep.ok
    (looked_at,), (read,) = shallow.generations, deep.generations
    assert looked_at.nbytes == 0
    assert read.chunks == read.records == looked_at.records == 16
    elements = 96 * 32 + 2 * (7680 + 64 + 64) + 64 + 96 * 32  # norms of 32 take 64
    assert read.nbytes == 14 * elements


def test_a_flipped_bit_is_found_and_named(store: Path) -> None:
    path = shard_of(store, "layer.001.master")
    flip(path, 4 * 1024 + 2)
    assert verify(store).ok
    (finding,) = verify(store, deep=True).findings
    assert isinstance(finding, Finding)
    assert (finding.file, finding.unit, finding.role) == (str(path), "layer.001", "master")
    assert finding.offset == 0
    assert "model.layers.1.self_attn.q_proj.weight" in finding.tensors
    assert "crc32c" in finding.what


def test_every_record_is_looked_at(store: Path) -> None:
    records = [path.parent.name for path in store.glob("slots/0/*/zarr.json")]
    for record in records:
        flip(shard_of(store, record), 0)
    found = {f"{f.unit}.{f.role}" for f in verify(store, deep=True).findings}
    assert found == set(records)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "too long"),
    ],
)
def test_a_shard_that_is_not_whole_is_found_without_reading(
    store: Path, damage: Callable[[Path], object], what: str
) -> None:
    path = shard_of(store, "layer.000.weights")
    damage(path)
    result = run("verify", store, code=1)
    assert what in result.stdout
    assert path.name in result.stdout
    for command in (("inspect", store), ("export", store, store.parent / "out")):
        assert path.name in run(*command, code=3).stderr


@pytest.mark.parametrize("name", ["config.json", "schema.json"])
def test_a_changed_side_file_is_found(store: Path, name: str) -> None:
    path = next(store.glob(f"schema/*/{name}"))
    path.write_bytes(path.read_bytes() + b" ")
    assert name in run("verify", store, code=1).stdout


def test_a_missing_drive_is_named(store: Path) -> None:
    (store.parent / "b").rename(store.parent / "gone")
    assert "drive 1" in run("verify", store, code=1).stdout


def test_the_report_is_one_json_document(store: Path) -> None:
    flip(shard_of(store, "layer.000.weights"), 0)
    report = json.loads(run("verify", "--deep", "--json", store, code=1).stdout)
    assert report["ok"] is False
    (finding,) = report["findings"]
    assert finding["unit"] == "layer.000"
    assert json.loads(run("verify", "--json", store).stdout)["ok"] is True


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_name_that_is_no_text_can_be_said(store: Path, options: tuple[str, ...]) -> None:
    link = store / "drives" / "0"
    target = os.fsencode(os.readlink(link))
    link.unlink()
    os.symlink(target[:-1] + b"\xaf", os.fsencode(link))
    result = run("verify", store, *options, code=1)
    assert "\\udcaf" in result.stdout
    if options:
        found = json.loads(result.stdout)["findings"]
        assert any("\udcaf" in finding["what"] for finding in found)


def test_no_store_is_an_error_and_no_finding(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no store"):
        verify(tmp_path)
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    run("verify", tmp_path, code=1)
