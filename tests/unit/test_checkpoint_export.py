from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from tests.support.hf_cli import round_trip, run
from tests.support.hf_folders import SINGLE, Tensors, assert_same, load_folder, make_llama, save


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    tensors = make_llama(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model" / "optimizer.pt").write_bytes(b"x")
    (tmp_path / "model" / "picture.png").write_bytes(b"x")
    return tensors


@pytest.fixture
def store(tmp_path: Path, tensors: Tensors) -> Path:
    run("convert", tmp_path / "model", tmp_path / "store")
    return tmp_path / "store"


def test_a_file_of_the_reference_library_is_the_same_file_again(
    tmp_path: Path, tensors: Tensors, store: Path
) -> None:
    run("export", store, tmp_path / "out")
    wanted = (tmp_path / "model" / SINGLE).read_bytes()
    assert (tmp_path / "out" / SINGLE).read_bytes() == wanted


def test_an_exported_model_computes_the_same(tmp_path: Path, store: Path) -> None:
    from transformers import AutoModelForCausalLM

    run("export", store, tmp_path / "out")
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        one, other = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits
            for name in ("model", "out")
        )
    assert torch.equal(one, other)


def test_side_files_travel_unchanged_and_others_stay(tmp_path: Path, store: Path) -> None:
    run("export", store, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        SINGLE, "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"
    }  # fmt: skip
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_what_stays_behind_is_listed(tmp_path: Path, tensors: Tensors) -> None:
    notes = run("convert", tmp_path / "model", tmp_path / "other").stderr
    assert "ignored optimizer.pt" in notes
    assert "ignored picture.png" in notes


@pytest.mark.parametrize("name", ["a\nb.json", "a\x7f.gguf", os.fsdecode(b"\xff.md"), "dir.json"])
def test_what_a_store_cannot_carry_stays_behind(tmp_path: Path, name: str) -> None:
    tensors = make_llama(tmp_path / "model")
    beside = tmp_path / "model" / name
    if name == "dir.json":
        beside.mkdir()
    else:
        beside.write_bytes(b"{}")
    (tmp_path / "model" / "übrig, und mehr (2).txt").write_bytes(b"kept")
    assert "ignored " in round_trip(tmp_path / "model", tensors)
    assert (tmp_path / "out" / "übrig, und mehr (2).txt").read_bytes() == b"kept"
    assert not (tmp_path / "out" / name).exists()


def test_an_existing_folder_is_replaced_only_on_request(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "out"
    run("export", store, out)
    (out / "stale.safetensors").write_bytes(b"")
    assert "--overwrite" in run("export", store, out, code=3).stderr
    assert (out / "stale.safetensors").exists()
    run("export", store, out, "--overwrite")
    assert not (out / "stale.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "store"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    assert "is no model folder" in run("export", store, out, "--overwrite", code=3).stderr
    assert (out / "thesis.tex").read_text() == "precious"


def test_an_export_does_not_follow_a_link(tmp_path: Path, store: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    assert "is a link" in run("export", store, tmp_path / "out", "--overwrite", code=3).stderr
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("out", ["store", "store/out", "."])
def test_an_export_never_overlaps_the_store(tmp_path: Path, store: Path, out: str) -> None:
    message = run("export", store, tmp_path / out, "--overwrite", code=3).stderr
    assert "overlaps the store" in message
    run("verify", "--deep", store)


def test_exported_files_are_readable_as_the_umask_says(tmp_path: Path, store: Path) -> None:
    before = os.umask(0o022)
    try:
        run("export", store, tmp_path / "out")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "out" / SINGLE).stat().st_mode) == 0o644


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own(
    tmp_path: Path, tensors: Tensors, store: Path
) -> None:
    run("export", store, tmp_path / "out", "--max-shard-size", "1B")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(tensors)
    assert_same(load_folder(tmp_path / "out"), tensors)


def test_an_unknown_generation_is_named_with_those_there_are(tmp_path: Path, store: Path) -> None:
    message = run("export", store, tmp_path / "out", "--generation", "7", code=3).stderr
    assert "no generation 7; there is 1" in message
    assert not (tmp_path / "out").exists()


def test_a_damaged_byte_stops_an_export_and_names_its_place(tmp_path: Path, store: Path) -> None:
    path = next((store / "shards").glob("0.layer.001.weights.*"))
    with path.open("r+b") as file:
        file.seek(77)
        file.write(b"\x55")
    message = run("export", store, tmp_path / "out", code=3).stderr
    assert all(part in message for part in (path.name, "drive 0", "layer.001.weights", "crc32c"))
    assert not (tmp_path / "out").exists()


def test_mixed_widths_keep_every_tensor_aligned(tmp_path: Path, tensors: Tensors) -> None:
    odd = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(3)}
    odd |= {"model.layers.1.attn.bias": torch.ones(5, dtype=torch.uint8)}
    save(tmp_path / "model", tensors | odd)
    run("convert", tmp_path / "model", tmp_path / "store")
    run("export", tmp_path / "store", tmp_path / "out")
    data = (tmp_path / "out" / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    widths = {"F32": 4, "BF16": 2, "U8": 1}
    assert all(e["data_offsets"][0] % widths[e["dtype"]] == 0 for e in header.values())
    assert_same(load_folder(tmp_path / "out"), tensors | odd)
