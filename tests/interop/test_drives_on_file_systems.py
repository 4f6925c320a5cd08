"""A model on real file systems: striped, moved to more and to fewer drives, attached again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.hf_cli import run
from tests.support.hf_folders import assert_same, load_folder, make_llama
from tests.support.loops import loop_mount
from tiering.store import open_reader, open_writer

pytestmark = pytest.mark.root

LAYERS = 40  # shards that are small beside the share of the slowest drive
SECTORS = {"a": 512, "b": 4096, "c": 512, "d": 4096}


@pytest.fixture(name="drives", params=["ext4", "xfs"])
def _drives(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Lend four file systems, on devices with small and with large sectors."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                loop_mount(
                    tmp_path, filesystem=request.param, sector_nbytes=sector_nbytes, name=name
                )
            ).point
            for name, sector_nbytes in SECTORS.items()
        }


def _options(drives: Mapping[str, Path], names: str) -> list[object]:
    return [part for name in names for part in ("--drive", drives[name])]


def test_a_model_moves_from_one_drive_to_four_to_two_and_is_attached_again_bit_for_bit(
    drives: dict[str, Path], tmp_path: Path
) -> None:
    wanted = make_llama(tmp_path / "model", num_hidden_layers=LAYERS)
    store = tmp_path / "store"
    run("convert", tmp_path / "model", store, *_options(drives, "a"))
    with open_writer(store) as writer:
        writer.ensure_slots(2)
        assert all(access.direct for access in writer.access)
    before = _contents(store)
    for names in ("abcd", "bd"):
        result = run("shard", store, *_options(drives, names))
        assert result.stderr.count("takes") == len(names)
        _assert_whole_and_balanced(store, drives, names, before)
    moved = drives["b"] / "mounted elsewhere"
    [folder] = drives["b"].glob("megatrain-*")
    folder.rename(moved)
    assert "megatrain-ckpt attach" in run("inspect", store, code=3).stderr
    run("attach", store, "--drive", moved)
    _assert_whole_and_balanced(store, drives, "bd", before)
    run("export", store, tmp_path / "out")
    assert_same(load_folder(tmp_path / "out"), wanted)


def test_a_store_is_striped_at_creation_in_proportion_to_what_the_drives_can_do(
    drives: dict[str, Path], tmp_path: Path
) -> None:
    make_llama(tmp_path / "model", num_hidden_layers=LAYERS)
    store = tmp_path / "store"
    result = run("convert", tmp_path / "model", store, *_options(drives, "abcd"))
    assert result.stderr.count("takes") == 4
    _assert_whole_and_balanced(store, drives, "abcd", _contents(store))


def _contents(store: Path) -> dict[str, bytes]:
    with open_reader(store) as reader:
        found = {name: bytearray(record.nbytes) for name, record in reader.records.items()}
        for name, out in found.items():
            reader.read(name, 0, memoryview(out))
    return {name: bytes(out) for name, out in found.items()}


def _assert_whole_and_balanced(
    store: Path, drives: Mapping[str, Path], names: str, before: Mapping[str, bytes]
) -> None:
    run("verify", "--deep", store)
    assert _contents(store) == before
    for name in sorted(before)[::9]:
        for read in (_zarr, _tensorstore):
            array = np.ascontiguousarray(read(store / "slots/0" / name))
            assert array.reshape(-1).view(np.uint8).tobytes() == before[name], (name, read)
    lines = json.loads(run("inspect", store, "--json").stdout)["drives"]
    assert {Path(line["folder"]).parent for line in lines} == {drives[name] for name in names}
    nbytes, files = (sum(line[key] for line in lines) for key in ("nbytes", "files"))
    assert files == len(list(store.glob("slots/0/*/c/*")))
    for line in lines:
        assert line["nbytes"] == pytest.approx(line["share"] * nbytes, rel=0.1)
        assert line["allocated_nbytes"] < line["nbytes"], "moments that are zero take no room"
    used = [name for name in drives if list(drives[name].glob("*/drive.json"))]
    assert used == list(names), "a drive that holds nothing has no folder of the store"


def _zarr(folder: Path) -> Any:
    import zarr

    from tiering.backends.zarr_bfloat16 import register_bfloat16

    register_bfloat16()
    return zarr.open_array(folder, mode="r")[:]


def _tensorstore(folder: Path) -> Any:
    tensorstore = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": os.fspath(folder)}}
    return tensorstore.open(spec, open=True, read=True).result().read().result()
