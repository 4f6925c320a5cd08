from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from checkpoint.names import Expected, expected_model
from tiering.errors import RefusedError

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "intermediate_size": 48, "num_key_value_heads": 2, **SIZES}
OPT = {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 16, **SIZES}
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2,
        "n_head": 4}  # fmt: skip


def expect(config: dict[str, Any], **changes: Any) -> Expected:
    return expected_model(config | changes, "config.json")


def names_in(expected: Expected, unit: str) -> list[str]:
    return [p.name for p in expected.parameters if p.unit == unit]


def test_each_layer_is_a_unit_between_what_runs_before_and_after() -> None:
    expected = expect(LLAMA)
    assert names_in(expected, "outer_in") == ["model.embed_tokens.weight"]
    assert names_in(expected, "outer_out") == ["model.norm.weight", "lm_head.weight"]
    counts = Counter(parameter.unit for parameter in expected.parameters)
    assert counts["layer.000"] == counts["layer.001"] == 9
    units = list(dict.fromkeys(parameter.unit for parameter in expected.parameters))
    assert units == ["outer_in", "layer.000", "layer.001", "outer_out"]


def test_a_layer_keeps_the_order_of_its_module() -> None:
    assert [n.removeprefix("model.layers.1.") for n in names_in(expect(LLAMA), "layer.001")] == [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]


def test_more_than_ten_layers_stay_in_order() -> None:
    units = [p.unit for p in expect(LLAMA, num_hidden_layers=12).parameters]
    assert list(dict.fromkeys(units))[1:-1] == [f"layer.{i:03d}" for i in range(12)]


def test_what_is_registered_early_but_runs_late_is_after_the_layers() -> None:
    expected = expect(OPT)
    assert names_in(expected, "outer_in") == [
        "model.decoder.embed_tokens.weight",
        "model.decoder.embed_positions.weight",
        "model.decoder.project_in.weight",
    ]
    assert names_in(expected, "outer_out") == [
        "model.decoder.project_out.weight",
        "model.decoder.final_layer_norm.weight",
        "model.decoder.final_layer_norm.bias",
    ]


@pytest.mark.parametrize(
    ("config", "tied", "alias", "target"),
    [
        (LLAMA, True, "lm_head.weight", "model.embed_tokens.weight"),
        (GPT2, True, "lm_head.weight", "transformer.wte.weight"),
        (LLAMA, False, "lm_head.weight", None),
        (GPT2, False, "lm_head.weight", None),
    ],
)
def test_a_tied_head_is_another_name_of_the_embedding(
    config: dict[str, Any], tied: bool, alias: str, target: str | None
) -> None:
    expected = expect(config, tie_word_embeddings=tied)
    assert expected.aliases == ({alias: target} if target else {})
    assert (alias in names_in(expected, "outer_out")) == (target is None)


def test_buffers_that_the_model_computes_are_not_expected() -> None:
    expected = expect(LLAMA)
    assert expected.buffers == {}
    assert "model.rotary_emb.inv_freq" in expected.transient


def test_a_configuration_is_not_changed_and_code_is_not_run() -> None:
    config = LLAMA | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "quantization_config": {}}
    before = dict(config)
    expect(config)
    assert config == before
    with pytest.raises(RefusedError, match="code that a model brings along is not run"):
        expect(config, model_type="evil")
