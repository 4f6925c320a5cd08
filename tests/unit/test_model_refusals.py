"""What cannot be streamed exactly is refused by name before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from checkpoint.schema import Unit, pack
from megatrain.model.capture import LayerCall, require_constant
from megatrain.model.streamed import StreamedModel
from tests.support.model_driver import make_units
from tests.support.model_zoo import CONFIGS, make_plain
from tiering.errors import RefusedError

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(folder: Path, units: list[Unit], **options: Any) -> StreamedModel:
    return StreamedModel(
        folder,
        units,
        dtype=torch.float32,
        device=torch.device("cpu"),
        loss_chunk=16,
        **options,
    )


def refusal(folder: Path, units: list[Unit], **options: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        build(folder, units, **options)
    return str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def llama(tmp_path: Path) -> list[Unit]:
    return make_units(make_plain("llama", tmp_path, tied=False))


def test_a_family_without_a_parity_test(tmp_path: Path) -> None:
    config = tf.GPTJConfig(vocab_size=96, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
    units = make_units(plain_of(config, tmp_path))
    message = refusal(tmp_path, units)
    assert message.startswith("model family 'gptj' has no parity test; supported: cohere, ")
    assert message.endswith("pass any_family to try it anyway")
    assert build(tmp_path, units, any_family=True).layers == 2


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    assert refusal(tmp_path, []).startswith(f"{tmp_path}: no usable model configuration: ")


def test_an_unknown_family(llama: list[Unit], tmp_path: Path) -> None:
    change_config(tmp_path, model_type="llama9")
    assert "llama9" in refusal(tmp_path, llama)


def test_quantized_weights(llama: list[Unit], tmp_path: Path) -> None:
    change_config(tmp_path, quantization_config={"quant_method": "fp8"})
    assert refusal(tmp_path, llama) == (
        "llama: quantized weights cannot be trained; convert them first"
    )


def test_a_loss_beside_the_head_s(tmp_path: Path) -> None:
    units = make_units(make_plain("mixtral", tmp_path, tied=False))
    change_config(tmp_path, output_router_logits=True)
    assert refusal(tmp_path, units) == (
        "mixtral: output_router_logits adds a loss that no layer sees; set it to false"
    )


def test_settings_that_ask_for_more_outputs_are_turned_off(
    llama: list[Unit], tmp_path: Path
) -> None:
    change_config(tmp_path, output_hidden_states=True, output_attentions=True, return_dict=False)
    assert build(tmp_path, llama).layers == 2


def test_a_model_that_is_no_causal_lm(tmp_path: Path) -> None:
    tf.T5Config(vocab_size=96, d_model=32, num_layers=2, num_heads=4).save_pretrained(tmp_path)
    message = refusal(tmp_path, [], any_family=True)
    assert message == "t5: an encoder-decoder is not a causal language model"


def renamed(unit: Unit, old: str, new: str) -> Unit:
    return replace(
        unit,
        tensors=tuple(replace(t, name=t.name.replace(old, new)) for t in unit.tensors),
    )


def without_last(unit: Unit) -> Unit:
    return replace(unit, tensors=unit.tensors[:-1])


def transposed(unit: Unit) -> Unit:
    first, *rest = unit.tensors
    return replace(unit, tensors=(replace(first, shape=first.shape[::-1]), *rest))


Change = Callable[[list[Unit]], list[Unit]]
MISMATCHES: dict[str, tuple[Change, str]] = {
    "a tensor too much": (
        lambda units: [renamed(units[0], "embed_tokens", "words"), *units[1:]],
        "the model lacks model.words.weight",
    ),
    "a tensor too few": (
        lambda units: [*units[:-1], without_last(units[-1])],
        "the store lacks lm_head.weight",
    ),
    "a layer too few": (
        lambda units: [*units[:2], units[-1]],
        "the store lacks model.layers.1.input_layernorm.weight, "
        "model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight and 6 more",
    ),
    "another shape": (
        lambda units: [transposed(units[0]), *units[1:]],
        "model.embed_tokens.weight: shape (32, 96) in the store, (96, 32) in the model",
    ),
    "layers in another order": (
        lambda units: [units[0], units[2], units[1], units[3]],
        "layer.001 holds more than model.layers.0.*: model.layers.1.self_attn.q_proj.weight, "
        "model.layers.1.self_attn.k_proj.weight, model.layers.1.self_attn.v_proj.weight "
        "and 6 more",
    ),
    "no units": (lambda units: [], "0 units; need outer_in, the layers and outer_out"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_units_that_are_not_the_model_s(kind: str, llama: list[Unit], tmp_path: Path) -> None:
    change, message = MISMATCHES[kind]
    assert refusal(tmp_path, change(llama)) == message


def test_a_table_that_does_not_come_first(tmp_path: Path) -> None:
    units = make_units(make_plain("gpt2", tmp_path, tied=True))
    swapped = [(t.name, t.shape, t.dtype) for t in reversed(units[0].tensors)]
    units[0] = pack("outer_in", swapped)
    assert refusal(tmp_path, units) == (
        "outer_in begins with transformer.wpe.weight, not transformer.wte.weight"
    )


@pytest.mark.parametrize(
    ("family", "source", "target", "name", "why"),
    [
        ("llama", -1, 0, "model.norm.weight", "stored before the layers but used after them"),
        ("gpt2", 0, -1, "transformer.wpe.weight", "stored after the layers but used before them"),
    ],
)
def test_a_parameter_on_the_wrong_side_of_the_layers(
    family: str, source: int, target: int, name: str, why: str, tmp_path: Path
) -> None:
    units = make_units(make_plain(family, tmp_path, tied=False))
    moved = [t for t in units[source].tensors if t.name == name]
    kept = [t for t in units[source].tensors if t.name != name]
    both = [*units[target].tensors, *moved]
    units[source] = pack(units[source].name, [(t.name, t.shape, t.dtype) for t in kept])
    units[target] = pack(units[target].name, [(t.name, t.shape, t.dtype) for t in both])
    assert refusal(tmp_path, units) == f"{name} is {why}"


def test_a_loop_that_unpacks_what_its_layers_return(tmp_path: Path) -> None:
    config = tf.FalconConfig(**SMALL)
    assert refusal(tmp_path, make_units(plain_of(config, tmp_path)), any_family=True) == (
        "the model changes or unpacks the hidden state before layer 1"
    )


def test_persistent_buffers_whose_values_are_not_given(tmp_path: Path) -> None:
    config = tf.DeepseekV3Config(
        **SMALL,
        intermediate_size=48,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    units = make_units(plain_of(config, tmp_path))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert refusal(tmp_path, units, any_family=True) == (
        f"the values of buffer {name} were not given"
    )
    bias = torch.arange(4.0)
    model = build(tmp_path, units, any_family=True, buffers={name: bias})
    gate = model._template.layers[1].get_submodule("mlp.gate")
    assert torch.equal(gate.get_buffer("e_score_correction_bias"), bias)
    message = refusal(tmp_path, units, any_family=True, buffers={name: torch.zeros(5)})
    assert message == f"buffer {name}: shape (5,), the model has (4,)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            LayerCall((), {"per_layer": torch.ones(2, requires_grad=True)}),
            "layer 3: per_layer carries a gradient into the layer; that is not streamed",
        ),
        (
            LayerCall((None, (torch.ones(1), torch.ones(1, requires_grad=True))), {}),
            "layer 3: argument 2 carries a gradient into the layer; that is not streamed",
        ),
        (
            LayerCall((), {"cache": {}}),
            "layer 3: cache is a dict, which layers could share and change",
        ),
    ],
)
def test_layer_arguments_that_are_not_constants(call: LayerCall, message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        require_constant(3, call)
    assert str(caught.value) == message


def test_a_table_is_given_exactly_when_the_head_is_tied(llama: list[Unit], tmp_path: Path) -> None:
    model = build(tmp_path, llama)
    table = torch.zeros(96, 32)
    with pytest.raises(ValueError, match="a tied head takes the table"):
        model.head(
            torch.zeros(llama[-1].length),
            table,
            torch.zeros(1, 2, 32),
            torch.zeros(1, 2, dtype=torch.int64),
            target_count=2,
            grads=torch.zeros(llama[-1].length),
            table_grads=table,
        )


def test_a_buffer_of_the_wrong_length(llama: list[Unit], tmp_path: Path) -> None:
    model = build(tmp_path, llama)
    hidden, short = torch.zeros(1, 2, 32), torch.zeros(llama[1].length - 64)
    with pytest.raises(ValueError, match=rf"buffer of shape \({len(short)},\), need"):
        model.forward_layer(0, short, hidden, LayerCall((), {}), seed=0)


def test_the_supported_families_are_those_that_the_tests_train() -> None:
    from megatrain.model.families import SUPPORTED

    assert set(CONFIGS) == SUPPORTED


def plain_of(config: Any, folder: Path) -> Any:
    config.save_pretrained(folder)
    return tf.AutoModelForCausalLM.from_config(config)
