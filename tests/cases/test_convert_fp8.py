"""FP8 weights, which mean nothing without their scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.hf_cli import refuse, run
from tests.support.hf_folders import (
    Tensors,
    assert_same,
    edit_json,
    load_folder,
    make_llama,
    save,
    shard,
)

WEIGHT = "model.layers.0.mlp.gate_proj.weight"  # 200 x 160
SCALE = WEIGHT + "_scale_inv"
OTHER = "model.layers.0.mlp.up_proj.weight"


def quantise(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales with one scale for each block."""
    height, width = weight.shape
    scale = torch.empty(-(-height // rows), -(-width // columns))
    codes = torch.empty(height, width, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (
                slice(rows * i, rows * (i + 1)),
                slice(columns * j, columns * (j + 1)),
            )
            scale[i, j] = weight[block].float().abs().max() / 448
            codes[block] = (weight[block].float() / scale[i, j]).to(codes.dtype)
    return codes, scale


def dequantise(codes: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    height, width = codes.shape
    wide = scale.float().repeat_interleave(rows, 0)[:height]
    return codes.float() * wide.repeat_interleave(columns, 1)[:, :width]


def make_fp8(folder: Path, rows: int = 128, columns: int = 128) -> Tensors:
    tensors = make_llama(folder, hidden_size=160, intermediate_size=200, head_dim=40)
    for name in (WEIGHT, OTHER):
        tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensors[name], rows, columns)
    block = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    edit_json(folder / "config.json", quantization_config=block)
    save(folder, tensors)
    return tensors


def masters(tmp_path: Path, *options: str) -> Tensors:
    run("convert", tmp_path / "model", tmp_path / "store", *options)
    run("export", tmp_path / "store", tmp_path / "masters", "--dtype", "float32")
    return load_folder(tmp_path / "masters")


@pytest.mark.parametrize(
    ("rows", "columns", "ram"), [(128, 128, "1GiB"), (128, 128, "64KiB"), (64, 96, "64KiB")]
)
def test_the_master_is_code_times_scale_bit_for_bit(
    tmp_path: Path, rows: int, columns: int, ram: str
) -> None:
    tensors = make_fp8(tmp_path / "model", rows, columns)
    scales = {name: tensors.pop(f"{name}_scale_inv") for name in (WEIGHT, OTHER)}
    wanted = {name: tensor.float() for name, tensor in tensors.items()}
    for name, scale in scales.items():
        wanted[name] = dequantise(tensors[name], scale, rows, columns)
    assert_same(masters(tmp_path, "--ram", ram), wanted)


def test_it_leaves_as_bf16_of_a_model_that_is_not_quantised(tmp_path: Path) -> None:
    tensors = make_fp8(tmp_path / "model")
    shard(tmp_path / "model", tensors, 3)  # scale and weight in different files
    notes = run("convert", tmp_path / "model", tmp_path / "store").stderr
    assert f"2 FP8 tensors, first {WEIGHT}" in notes
    assert "changed quantization_config" in notes
    run("export", tmp_path / "store", tmp_path / "out")
    wanted = dict(tensors)
    for name in (WEIGHT, OTHER):
        scale = wanted.pop(f"{name}_scale_inv")
        wanted[name] = dequantise(tensors[name], scale, 128, 128).bfloat16()
    assert_same(load_folder(tmp_path / "out"), wanted)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("kind", ["scalar", "one", "row", "rows"])
def test_without_blocks_a_scale_is_for_the_matrix_or_for_each_row(
    tmp_path: Path, kind: str
) -> None:
    tensors = make_fp8(tmp_path / "model", 1, 160)
    edit_json(tmp_path / "model" / "config.json", quantization_config={"quant_method": "fp8"})
    scale = tensors[SCALE]
    shapes = {"scalar": scale[0, 0], "one": scale[0], "row": scale, "rows": scale[:, 0]}
    save(tmp_path / "model", tensors | {SCALE: shapes[kind].bfloat16()})
    rows = 200 if kind in ("scalar", "one") else 1
    grid = shapes[kind].bfloat16().reshape(-1, 1)
    wanted = dequantise(tensors[WEIGHT], grid, rows, 160)
    assert torch.equal(masters(tmp_path)[WEIGHT], wanted)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (None, (WEIGHT, f"its scale {SCALE} is not there")),
        (torch.ones(1, 2), (WEIGHT, f"scale {SCALE} has shape [1, 2], expected [2, 2]")),
        (torch.ones(2), (WEIGHT, f"scale {SCALE} has shape [2], expected [2, 2]")),
        (torch.ones(()), (WEIGHT, f"scale {SCALE} has shape [], expected [2, 2]")),
        (torch.ones(2, 2).to(torch.int32), (SCALE, "is I32, expected one of BF16, F16, F32")),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(
    tmp_path: Path, change: torch.Tensor | None, parts: tuple[str, ...]
) -> None:
    tensors = make_fp8(tmp_path / "model")
    del tensors[SCALE]
    save(tmp_path / "model", tensors | ({} if change is None else {SCALE: change}))
    said = refuse(tmp_path / "model")
    assert "model.safetensors" in said
    assert all(part in said for part in parts)


def test_a_scale_of_a_weight_that_is_not_fp8_is_refused(tmp_path: Path) -> None:
    tensors = make_fp8(tmp_path / "model")
    save(tmp_path / "model", tensors | {WEIGHT: tensors[WEIGHT].bfloat16()})
    assert f"unexpected 1: {SCALE}" in refuse(tmp_path / "model")


@pytest.mark.parametrize("block", [[128], "128", [0, 128], [128, 128.0]])
def test_a_block_size_that_is_none_is_refused(tmp_path: Path, block: object) -> None:
    make_fp8(tmp_path / "model")
    quantization = {"quant_method": "fp8", "weight_block_size": block}
    edit_json(tmp_path / "model" / "config.json", quantization_config=quantization)
    assert "weight_block_size must be two lengths" in refuse(tmp_path / "model")
