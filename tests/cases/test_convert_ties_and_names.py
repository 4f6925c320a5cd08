"""Tied heads, buffers saved as weights, wrapper prefixes, and data types that must not be lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoint.checked import read_schema
from checkpoint.schema import Schema
from tests.support.hf_cli import refuse, round_trip, run
from tests.support.hf_folders import (
    EMBEDDING,
    HEAD,
    NORM,
    Tensors,
    assert_same,
    edit_json,
    load_folder,
    make_gpt2,
    make_llama,
    save,
    shard,
    without,
)
from tiering.store import open_reader


def schema_of(store: Path) -> Schema:
    with open_reader(store) as reader:
        return read_schema(reader)


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20)).logits


@pytest.mark.parametrize("shards", [1, 3])
def test_an_equal_head_is_stored_once_and_comes_back(tmp_path: Path, shards: int) -> None:
    tensors = make_llama(tmp_path / "model", tie=True)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    save(tmp_path / "model", tensors)
    if shards > 1:
        shard(tmp_path / "model", tensors, shards)
    notes = round_trip(tmp_path / "model", tensors)
    assert f"{HEAD} equals {EMBEDDING} in every bit" in notes
    schema = schema_of(tmp_path / "store")
    assert [(tie.alias, tie.target, tie.in_source) for tie in schema.ties] == [
        (HEAD, EMBEDDING, True)
    ]
    assert schema.parameters == sum(t.numel() for t in without(tensors, [HEAD]).values())
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "model"))


def test_a_head_that_is_not_in_the_file_is_tied_and_stays_absent(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model", tie=True)
    assert HEAD not in tensors
    assert round_trip(tmp_path / "model", tensors) == ""
    (tie,) = schema_of(tmp_path / "store").ties
    assert not tie.in_source


@pytest.mark.parametrize(
    "difference", ["all", "last bit", "float32 rounding", "float32 equal", "dtype"]
)
def test_a_different_head_is_kept_and_untied(tmp_path: Path, difference: str) -> None:
    tensors = make_llama(tmp_path / "model", tie=True)
    embedding = tensors[EMBEDDING]
    last = embedding.clone()
    last.view(torch.int16)[-1, -1] ^= 1
    tensors[HEAD] = {
        "all": embedding + 1,
        "last bit": last,
        "float32 rounding": embedding.float() * (1 + 2**-10),
        "float32 equal": embedding.float(),
        "dtype": embedding.view(torch.float16),  # equal bytes, other values
    }[difference]
    save(tmp_path / "model", tensors)
    notes = round_trip(tmp_path / "model", tensors)
    assert all(part in notes for part in (HEAD, EMBEDDING, "differ", "tie_word_embeddings"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is (
        False
    )
    schema = schema_of(tmp_path / "store")
    assert schema.ties == ()
    assert schema.find(HEAD)[0].name == "outer_out"
    assert any("differ" in note for note in schema.ledger.notes)
    inspected = json.loads(run("inspect", "--json", tmp_path / "store").stdout)
    assert any("differ" in note for note in inspected["ledger"]["notes"])


def test_a_different_head_is_dropped_on_request_only(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model", tie=True)
    save(tmp_path / "model", tensors | {HEAD: tensors[EMBEDDING] + 1})
    notes = round_trip(tmp_path / "model", tensors, "--tie")
    assert f"ignored {HEAD}: differs from {EMBEDDING}" in notes


def test_a_head_without_its_embedding_is_refused(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model", tie=True)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    save(tmp_path / "model", tensors)
    assert f"missing 1: {EMBEDDING}" in refuse(tmp_path / "model")


def test_equal_tensors_of_an_untied_model_stay_two(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model")
    tensors[HEAD] = tensors[EMBEDDING].clone()
    save(tmp_path / "model", tensors)
    assert round_trip(tmp_path / "model", tensors) == ""
    assert schema_of(tmp_path / "store").ties == ()


@pytest.mark.parametrize("where", ["each layer", "model"])
def test_rotary_tables_are_carried_not_trained(tmp_path: Path, where: str) -> None:
    tensors = make_llama(tmp_path / "model")
    parameters = sum(tensor.numel() for tensor in tensors.values())
    layers = [f"model.layers.{i}.self_attn" for i in (0, 1)] if where == "each layer" else ["model"]
    tensors |= {f"{layer}.rotary_emb.inv_freq": torch.rand(4) for layer in layers}
    save(tmp_path / "model", tensors)
    notes = round_trip(tmp_path / "model", tensors)
    assert f"carried along, not trained: {layers[0]}.rotary_emb.inv_freq" in notes
    schema = schema_of(tmp_path / "store")
    assert schema.parameters == parameters
    unit, _ = schema.find(f"{layers[0]}.rotary_emb.inv_freq")
    assert (unit.name, unit.trainable, schema.roles(unit)) == ("carried.F32", False, ("weights",))


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_attention_masks_are_carried_and_biases_trained(tmp_path: Path, prefix: str) -> None:
    plain = make_gpt2(tmp_path / "model")
    for i in (0, 1):
        mask = torch.ones(64, 64).tril().to(torch.uint8).view(1, 1, 64, 64)
        plain[f"transformer.h.{i}.attn.bias"] = mask
        plain[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    stored = {prefix + name.removeprefix("transformer."): t for name, t in plain.items()}
    save(tmp_path / "model", stored)
    notes = round_trip(tmp_path / "model", plain)
    assert "transformer.h.0.attn.bias" in notes
    assert ("'transformer.'" in notes) == (prefix == "")
    schema = schema_of(tmp_path / "store")
    for name, unit in (("bias", "carried.U8"), ("masked_bias", "carried.F32")):
        assert schema.find(f"transformer.h.1.attn.{name}")[0].name == unit
    assert schema.find("transformer.h.1.attn.c_attn.bias")[0].name == "layer.001"


def test_the_embedding_is_first_and_positions_follow(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "model")
    run("convert", tmp_path / "model", tmp_path / "store")
    names = [tensor.name for tensor in schema_of(tmp_path / "store").unit("outer_in").tensors]
    assert names == ["transformer.wte.weight", "transformer.wpe.weight"]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "student."])
def test_a_prefix_on_every_name_is_stripped(tmp_path: Path, prefix: str) -> None:
    tensors = make_llama(tmp_path / "model")
    save(tmp_path / "model", {prefix + name: tensor for name, tensor in tensors.items()})
    assert repr(prefix) in round_trip(tmp_path / "model", tensors)
    assert schema_of(tmp_path / "store").ledger.stripped == prefix


def test_a_prefix_on_some_names_is_refused(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model")
    mixed = {("_orig_mod." if "layers.1" in n else "") + n: t for n, t in tensors.items()}
    save(tmp_path / "model", mixed)
    said = refuse(tmp_path / "model")
    assert "model.safetensors: matched 12 of the 21 tensors that llama expects" in said
    assert "missing 9: model.layers.1." in said
    assert "unexpected 9: _orig_mod.model.layers.1." in said
    assert "9 of 21 names begin with '_orig_mod.'" in said


@pytest.mark.parametrize("tie", [True, False])
def test_a_base_model_without_its_prefix_is_mapped(tmp_path: Path, tie: bool) -> None:
    tensors = make_llama(tmp_path / "model", tie=tie)
    save(tmp_path / "model", {n.removeprefix("model."): t for n, t in tensors.items()})
    assert "'model.'" in round_trip(tmp_path / "model", tensors)
    assert torch.isfinite(logits(tmp_path / "out")).all()


def test_a_tensor_of_no_model_is_refused(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model")
    save(tmp_path / "model", tensors | {"model.layers.0.mlp.gate_proj.weight_scale": torch.ones(1)})
    assert "unexpected 1: model.layers.0.mlp.gate_proj.weight_scale" in refuse(tmp_path / "model")


def islands(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    wide = torch.rand(32, generator=generator) + 1
    half = (torch.rand(32, generator=generator) * 1e-6).half()
    return tensors | {NORM: wide, "model.layers.0.input_layernorm.weight": half}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tensor_keeps_its_own_data_type(tmp_path: Path, dtype: str) -> None:
    tensors = islands(make_llama(tmp_path / "model"))
    save(tmp_path / "model", tensors)
    round_trip(tmp_path / "model", tensors, "--dtype", dtype)


def test_the_master_is_the_exact_source_value(tmp_path: Path) -> None:
    tensors = islands(make_llama(tmp_path / "model"))
    save(tmp_path / "model", tensors)
    run("convert", tmp_path / "model", tmp_path / "store")
    run("export", tmp_path / "store", tmp_path / "out", "--dtype", "float32")
    assert_same(load_folder(tmp_path / "out"), {n: t.float() for n, t in tensors.items()})
    assert "float32" in (tmp_path / "out" / "config.json").read_text()


def test_weights_are_rounded_to_nearest_even(tmp_path: Path) -> None:
    tensors = islands(make_llama(tmp_path / "model"))
    save(tmp_path / "model", tensors)
    run("convert", tmp_path / "model", tmp_path / "store")
    run("export", tmp_path / "store", tmp_path / "out", "--dtype", "bfloat16")
    assert_same(load_folder(tmp_path / "out"), {n: t.bfloat16() for n, t in tensors.items()})


def test_every_bit_pattern_survives(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model", vocab_size=2048)
    tensors[EMBEDDING] = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).view(2048, 32)
    bits = torch.arange(1 << 16).to(torch.int16)
    tensors[HEAD] = bits.view(torch.float16).view(2048, 32)
    save(tmp_path / "model", tensors)
    round_trip(tmp_path / "model", tensors)


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors", None])
def test_quantised_weights_are_refused_by_name(tmp_path: Path, method: str | None) -> None:
    make_llama(tmp_path / "model")
    quantization = {"quant_method": method} if method else {"bits": 4}
    edit_json(tmp_path / "model" / "config.json", quantization_config=quantization)
    said = refuse(tmp_path / "model")
    assert "config.json: quantization_config" in said
    assert repr(method) in said


def test_odd_sizes_come_back_exactly(tmp_path: Path) -> None:
    tensors = make_llama(
        tmp_path / "model", vocab_size=97, hidden_size=30, intermediate_size=51,
        num_attention_heads=3, num_key_value_heads=1, head_dim=10,
    )  # fmt: skip
    assert {60, 600, 1800, 3060, 5820} == {tensor.nbytes for tensor in tensors.values()}
    round_trip(tmp_path / "model", tensors, "--ram", "64KiB")
