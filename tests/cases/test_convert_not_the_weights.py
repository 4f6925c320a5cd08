"""Files that are not the weights, or not all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.hf_cli import refuse, run
from tests.support.hf_folders import (
    INDEX,
    SINGLE,
    make_llama,
    save,
    shard,
    shard_name,
    split_file,
    write_json,
)

SECOND = shard_name(1, 2)


def pointer(data: bytes) -> bytes:
    digest = b"0" * 64
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (
        digest,
        len(data),
    )


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (pointer, ("Git LFS pointer", "for a file of {size} B", "git lfs pull")),
        (lambda b: b"<!DOCTYPE html><html><body>sign in</body></html>", ("HTML",)),
        (lambda b: b"\xef\xbb\xbf<!doctype html>", ("HTML",)),
        (lambda b: b"Invalid credentials", ("it is text that begins with 'Invalid credentials'",)),
        (lambda b: b'{"error": "gated"}' * 9, ("it is text that begins with",)),
        (lambda b: b"", ("is empty",)),
        (lambda b: b[:200], ("inside its header", "200 B")),
        (lambda b: b[:5], ("5 B, too short",)),
        (lambda b: b[:-1000], ("too short: expected {size} B", "1000 B missing", "{lost}")),
        (lambda b: b[:-1], ("1 B missing", "{lost}")),
        (lambda b: b + bytes(64), ("too long: expected {size} B", "64 B follow the last tensor")),
        (lambda b: bytes(len(b)), ("zeros only",)),
    ],
    ids=[
        "lfs",
        "html",
        "marked html",
        "text",
        "json",
        "empty",
        "cut header",
        "cut prefix",
        "cut",
        "cut by one",
        "extra",
        "zeros",
    ],
)
@pytest.mark.parametrize("single", [True, False])
def test_a_file_that_is_not_whole_is_named_with_found_and_expected(
    tmp_path: Path, damage: Callable[[bytes], bytes], parts: tuple[str, ...], single: bool
) -> None:
    tensors = make_llama(tmp_path / "model")
    if not single:
        shard(tmp_path / "model", tensors, 2)
    path = tmp_path / "model" / (SINGLE if single else SECOND)
    header, tail = split_file(path)
    data = path.read_bytes()
    damaged = damage(data)
    path.write_bytes(damaged)
    left = len(damaged) - (len(data) - len(tail))
    ends = sorted((entry.get("data_offsets", [0, 0])[1], name) for name, entry in header.items())
    lost = next((name for end, name in ends if end > left), "")
    said = refuse(tmp_path / "model")
    assert path.name in said
    for part in parts:
        assert part.format(size=len(data), lost=lost) in said


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json", "tokenizer.model"])
def test_a_pointer_beside_the_weights_is_named(tmp_path: Path, name: str) -> None:
    shard(tmp_path / "model", make_llama(tmp_path / "model"), 2)
    (tmp_path / "model" / name).write_bytes(pointer(bytes(700)))
    said = refuse(tmp_path / "model")
    assert name in said
    assert "it is a Git LFS pointer for a file of 700 B" in said


@pytest.mark.parametrize("name", ["config.json", INDEX, SINGLE, "tokenizer.json"])
@pytest.mark.parametrize("target", ["../../blobs/gone", "{name}"])
def test_a_link_to_nothing_is_named(tmp_path: Path, name: str, target: str) -> None:
    model = tmp_path / "model"
    tensors = make_llama(model)
    if name != SINGLE:
        shard(model, tensors, 2)
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(target.format(name=name))
    said = refuse(model)
    assert f"{name}: a link to {target.format(name=name)}, which is not there" in said


def test_a_folder_without_weights_says_what_was_expected(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    (tmp_path / "model" / SINGLE).unlink()
    assert "holds no weights; expected model.safetensors" in refuse(tmp_path / "model")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "no such folder" in refuse(tmp_path / "model")


def test_pickles_alone_are_refused_with_the_way_out(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model")
    (tmp_path / "model" / SINGLE).unlink()
    torch.save(tensors, tmp_path / "model" / "pytorch_model.bin")
    assert "pytorch_model.bin" in refuse(tmp_path / "model")
    assert "safe_serialization=True" in refuse(tmp_path / "model")


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    assert "no config.json" in refuse(tmp_path / "model")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "nonsense"}, "'nonsense' is unknown to transformers"),
        ({"model_type": "t5"}, "'t5' is not a causal language model"),
        ({"model_type": "llama", "hidden_size": "wide"}, "not a configuration"),
        ({"model_type": "llama", "num_attention_heads": 0}, "config.json"),
    ],
)
def test_a_configuration_of_no_causal_model_is_refused(
    tmp_path: Path, config: object, message: str
) -> None:
    make_llama(tmp_path / "model")
    write_json(tmp_path / "model" / "config.json", config)
    assert message in refuse(tmp_path / "model")


def test_a_shape_that_differs_from_the_configuration_is_named(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"
    save(tmp_path / "model", tensors | {name: torch.zeros(47, 32, dtype=torch.bfloat16)})
    said = refuse(tmp_path / "model")
    assert f"{SINGLE}: tensor {name} has shape [47, 32], expected [48, 32]" in said


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool])
def test_a_parameter_that_no_master_can_hold_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = make_llama(tmp_path / "model")
    name = "model.norm.weight"
    save(tmp_path / "model", tensors | {name: tensors[name].to(dtype)})
    said = refuse(tmp_path / "model")
    assert SINGLE in said
    assert f"parameter {name} is " in said
    assert "must be one of BF16, F16, F32" in said


def test_a_store_is_never_overwritten(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    run("convert", tmp_path / "model", tmp_path / "store")
    before = (tmp_path / "store" / "zarr.json").read_bytes()
    result = run("convert", tmp_path / "model", tmp_path / "store", code=3)
    assert "is a store" in result.stderr
    assert (tmp_path / "store" / "zarr.json").read_bytes() == before


def test_a_store_does_not_go_into_its_source(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    result = run("convert", tmp_path / "model", tmp_path / "model" / "store", code=3)
    assert "inside the source folder" in result.stderr
