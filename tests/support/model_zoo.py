"""Tiny random models of each family, and batches for them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.support.model_driver import IGNORED, Batch

VOCABULARY = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_NEOX = {k: v for k, v in _SHAPE.items() if k != "num_key_value_heads"}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}

CONFIGS: dict[str, Any] = {
    "llama": tf.LlamaConfig(**_SHAPE),
    "mistral": tf.MistralConfig(**_SHAPE, sliding_window=8),
    "qwen2": tf.Qwen2Config(**_SHAPE),
    "qwen3": tf.Qwen3Config(**_SHAPE, head_dim=8),
    "gemma": tf.GemmaConfig(**_SHAPE, head_dim=8),
    "gemma2": tf.Gemma2Config(
        **_SHAPE,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=8,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=5.0,
    ),
    "gemma3_text": tf.Gemma3TextConfig(
        **_SHAPE,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": tf.GPT2Config(**_GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt_neox": tf.GPTNeoXConfig(**_NEOX, hidden_dropout=0.0, attention_dropout=0.0),
    "olmo2": tf.Olmo2Config(**_SHAPE),
    "phi3": tf.Phi3Config(**_SHAPE),
    "phi": tf.PhiConfig(**_SHAPE),
    "granite": tf.GraniteConfig(
        **_SHAPE, logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5
    ),
    "cohere": tf.CohereConfig(**_SHAPE, logit_scale=0.25),
    "smollm3": tf.SmolLM3Config(**_SHAPE),
    "starcoder2": tf.Starcoder2Config(**_SHAPE),
    "stablelm": tf.StableLmConfig(**_SHAPE),
    "glm4": tf.Glm4Config(**_SHAPE, head_dim=8),
    "qwen3_moe": tf.Qwen3MoeConfig(
        **_SHAPE, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8
    ),
    "mixtral": tf.MixtralConfig(**_SHAPE, num_local_experts=4),
    "gpt_oss": tf.GptOssConfig(
        **_SHAPE, num_local_experts=4, head_dim=8, num_experts_per_tok=2, sliding_window=8
    ),
}


def make_plain(family: str, folder: Path, *, tied: bool, **changes: Any) -> Any:
    """Return a plain model with random weights everywhere, its configuration saved in ``folder``."""
    config = copy.deepcopy(CONFIGS[family])
    config.tie_word_embeddings = tied
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def make_batch(seed: int, *, padded: bool = False, size: int = 2, length: int = 24) -> Batch:
    """Return random tokens; padded ones end early in all but the first row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (size, length), generator=generator)
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
    if not padded:
        return Batch(input_ids=ids, attention_mask=None, targets=targets)
    mask = torch.ones_like(ids)
    mask[1:, length - 7 :] = 0
    targets[1:, length - 8 :] = IGNORED
    return Batch(input_ids=ids * mask, attention_mask=mask, targets=targets)
