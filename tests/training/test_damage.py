"""A damaged byte is found before it is learned from, also where a step reads only rows."""

from __future__ import annotations

import pytest

from checkpoint.convert import convert
from checkpoint.schema import SCHEMA_FILE, Schema
from tests.support.runs import run_config, tiny_llama, token_rows, train
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
