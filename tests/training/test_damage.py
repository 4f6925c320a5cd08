"""A damaged byte is found before it is learned from, also where a step reads only rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from checkpoint.convert import convert
from checkpoint.schema import SCHEMA_FILE, Schema
from megatrain import run
from megatrain.ckpt_cli import cli as ckpt
from megatrain.cli import cli as megatrain
from megatrain.trainer import Stop
from tests.support.byte_map import byte_map
from tests.support.runs import Quiet, run_config, tiny_llama, token_rows, train
from tests.support.tiering_stores import small_chunks
from tiering.errors import CorruptionError
from tiering.store import open_reader


def flip(store, record_name: str, offset: int) -> None:
    """Change one byte of a record in the committed slot."""
    with open_reader(store) as reader:
        chunk = next(iter(reader.chunks(record_name)))
    with chunk.path.open("r+b") as file:
        file.seek(chunk.offset + offset)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    "record", ["outer_in.weights", "layer.001.weights", "layer.000.master", "outer_out.exp_avg"]
)
@pytest.mark.parametrize("resident", [0, 1 << 30])
def test_a_flipped_bit_in_any_record_ends_the_run_before_its_first_commit(
    tmp_path, tie, record, resident
):
    store = tmp_path / "store"
    convert(tiny_llama(tmp_path / "m", tie=tie), store)
    flip(store, record, offset=70)
    data = token_rows(tmp_path / "rows.jsonl")
    config = run_config(
        store, data, tmp_path / "run", train__dtype="bfloat16", memory__resident=max(1, resident)
    )
    with pytest.raises(CorruptionError, match=record.replace(".", r"\.")):
        train(config)
    with open_reader(store) as reader:
        assert reader.manifest.step == 0


def test_a_row_that_no_token_of_the_window_needs_is_checked_too(tmp_path):
    store = tmp_path / "store"
    model = tiny_llama(tmp_path / "m", vocab_size=20_000, hidden_size=64, head_dim=16)
    convert(model, store)
    flip(store, "outer_in.weights", offset=15_000 * 64 * 2)
    data = token_rows(tmp_path / "rows.jsonl")
    config = run_config(
        store,
        data,
        tmp_path / "run",
        train__dtype="bfloat16",
        memory__resident=1,
        memory__gradients="disk",
    )
    with pytest.raises(CorruptionError, match=r"outer_in\.weights"):
        train(config)


def test_what_is_carried_along_is_checked_when_a_run_reads_it(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    model = tiny_llama(tmp_path / "m")
    file = model / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    save_file(tensors, file, metadata={"format": "pt"})
    store = tmp_path / "store"
    convert(model, store)
    with open_reader(store) as reader:
        schema = Schema.decode(reader.schema_file(SCHEMA_FILE))
    carried = next(unit.name for unit in schema.units if not unit.trainable)
    flip(store, f"{carried}.weights", offset=3)
    with pytest.raises(CorruptionError, match=r"carried\.F32"):
        train(run_config(store, token_rows(tmp_path / "rows.jsonl"), tmp_path / "run"))


CODECS = {"nvme": None, "zarr": "blosc-zstd-shuffle"}


def flip_element(store: Path, record: str) -> Path:
    """Flip a bit in the middle of the first chunk of a record's last shard; return its file."""
    shards = [f for f in byte_map(store).values() if f.regions and f.record == record]
    shard, where = shards[-1], shards[-1].regions[0]
    at = (where.start + where.stop) // 2
    with shard.path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    return shard.path


def refused(command: object, *arguments: object) -> str:
    """Run a command that must end with 3, and return the line that it ends with."""
    result = CliRunner().invoke(command, list(map(str, arguments)))
    assert result.exit_code == 3, result.output
    return next(line for line in result.stderr.splitlines() if line.startswith("error: "))


@pytest.mark.parametrize("tier", CODECS)
def test_train_ends_with_3_at_a_flipped_bit_and_has_committed_nothing(tmp_path, tier):
    store = tmp_path / "store"
    data, settings = token_rows(tmp_path / "rows"), {"memory__resident": 1, "store__tier": tier}
    config = run_config(store, data, tmp_path / "run", **settings)
    (tmp_path / "run.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    with small_chunks():
        convert(tiny_llama(tmp_path / "m", num_hidden_layers=1), store, codec=CODECS[tier])
        path = flip_element(store, "layer.000.master")
        root = (store / "zarr.json").read_bytes()
        said = refused(megatrain, "train", tmp_path / "run.yaml")
    assert "drive 0" in said
    assert str(path) in said
    assert "layer.000.master" in said
    assert (store / "zarr.json").read_bytes() == root


@pytest.mark.parametrize("tier", CODECS)
def test_resume_and_export_end_with_3_at_a_flipped_bit_and_leave_nothing(tmp_path, tier):
    stop = Stop()
    model = tiny_llama(tmp_path / "m", num_hidden_layers=1, tie=True)
    config = run_config(
        model,
        token_rows(tmp_path / "rows"),
        tmp_path / "run",
        store__tier=tier,
        train__dtype="bfloat16",
    )
    with small_chunks():
        run.train(config, Quiet(lambda row: stop.request()), stop)
        store = tmp_path / "run" / "store"
        paths = [flip_element(store, f"outer_in.{role}") for role in ("weights", "exp_avg")]
        root = (store / "zarr.json").read_bytes()
        resumed = refused(ckpt, "resume", tmp_path / "run")
        exported = refused(ckpt, "export", store, tmp_path / "out")
    assert "drive 0" in resumed
    assert any(str(path) in resumed for path in paths)
    assert (store / "zarr.json").read_bytes() == root
    assert "drive 0" in exported
    assert str(paths[0]) in exported
    assert not (tmp_path / "out").exists()
