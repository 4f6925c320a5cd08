"""Small Hugging Face folders made on the spot, whole or damaged in a chosen way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

METADATA = {"format": "pt"}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"

Tensors = dict[str, torch.Tensor]


def make_llama(folder: Path, *, tie: bool = False, **changes: Any) -> Tensors:
    """Save a two-layer bf16 Llama as one file and return its tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(**(settings | changes), tie_word_embeddings=tie)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return load(folder / SINGLE)


def make_gpt2(folder: Path) -> Tensors:
    """Save a two-layer fp32 GPT-2 as one file and return its tensors."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return load(folder / SINGLE)


def load(path: Path) -> Tensors:
    """Return the tensors of a file, without keeping it mapped."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def load_folder(folder: Path) -> Tensors:
    """Return the tensors of every file of weights in a folder."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load(path)
    return tensors


def save(folder: Path, tensors: Mapping[str, torch.Tensor], name: str = SINGLE) -> None:
    """Write ``tensors`` as one file of ``folder``."""
    contiguous = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_file(contiguous, folder / name, metadata=METADATA)


def shard(folder: Path, tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, Any]:
    """Replace the single file by ``count`` shards with an index, and return the index."""
    names, weight_map = sorted(tensors), {}
    for i in range(count):
        file = shard_name(i, count)
        save(folder, {name: tensors[name] for name in names[i::count]}, file)
        weight_map |= dict.fromkeys(names[i::count], file)
    (folder / SINGLE).unlink(missing_ok=True)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX, index)
    return index


def shard_name(i: int, count: int) -> str:
    """Return the name of shard ``i``, counted from 0."""
    return f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def write_json(path: Path, document: object, *, encoding: str = "utf-8") -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(document), encoding=encoding)


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON object in a file."""
    write_json(path, json.loads(path.read_text()) | changes)


def split_file(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a safetensors file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def raw_file(header: bytes | Mapping[str, Any], data: bytes) -> bytes:
    """Return a safetensors file with this header, verbatim."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def assert_same(found: Tensors, wanted: Tensors) -> None:
    """Names, shapes, data types and bytes are equal."""
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bytes_of(found[name]) == bytes_of(tensor), name


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def without(tensors: Tensors, names: Iterable[str]) -> Tensors:
    """Return ``tensors`` without some names."""
    return {name: tensor for name, tensor in tensors.items() if name not in set(names)}
