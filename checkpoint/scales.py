"""FP8 weights and the scales without which they mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.codec import EXACT_IN_FLOAT32, Float32
from checkpoint.formats.safetensors import TensorInfo
from tiering.errors import RefusedError

FP8 = ("F8_E4M3", "F8_E5M2")
SUFFIX = "_scale_inv"

Locate = Callable[[TensorInfo], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The tensor that holds the scales of a matrix: one for each block of rows by columns."""

    tensor: TensorInfo
    rows: int
    columns: int
    grid: tuple[int, int]


def block_size(config: Mapping[str, Any], where: Path) -> tuple[int, int] | None:
    """Return the size of the blocks that share a scale, None if the configuration has no blocks.

    Raises:
        RefusedError: The weights are quantised in another way than FP8 with scales.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method != "fp8":
        raise RefusedError(
            f"{where}: quantization_config with quant_method {method!r}: of quantised weights only "
            f"'fp8' is converted; dequantise the model to BF16 first"
        )
    block = quantization.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(_is_length(n) for n in block)):
        raise RefusedError(f"{where}: weight_block_size must be two lengths, found {block!r}")
    return block[0], block[1]


def _is_length(value: object) -> bool:
    return type(value) is int and value > 0


def pair_scales(
    tensors: Mapping[str, TensorInfo], block: tuple[int, int] | None, path: Locate
) -> dict[str, Scale]:
    """Return the scale of every FP8 tensor by the tensor's name.

    Raises:
        RefusedError: A scale is missing, or is not of the shape that its tensor needs.
    """
    return {
        name: _scale(weight, tensors.get(name + SUFFIX), block, path)
        for name, weight in tensors.items()
        if weight.dtype in FP8
    }


def _scale(
    weight: TensorInfo, scale: TensorInfo | None, block: tuple[int, int] | None, path: Locate
) -> Scale:
    if scale is None:
        raise RefusedError(
            f"{path(weight)}: {weight.name} is {weight.dtype}, but its scale {weight.name}{SUFFIX} "
            f"is not there"
        )
    if len(weight.shape) != 2:
        raise RefusedError(
            f"{path(weight)}: {weight.name} is {weight.dtype} of shape {list(weight.shape)}; "
            f"only matrices are dequantised"
        )
    if scale.dtype not in EXACT_IN_FLOAT32:
        raise RefusedError(
            f"{path(scale)}: scale {scale.name} is {scale.dtype}, expected one of "
            f"{', '.join(EXACT_IN_FLOAT32)}"
        )
    rows, columns = _block_of(weight, scale, block, path)
    grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    return Scale(tensor=scale, rows=rows, columns=columns, grid=grid)


def _block_of(
    weight: TensorInfo, scale: TensorInfo, block: tuple[int, int] | None, path: Locate
) -> tuple[int, int]:
    height, width = weight.shape
    if block:
        wanted: list[tuple[int, ...]] = [(-(-height // block[0]), -(-width // block[1]))]
        found = block
    elif scale.nbytes and all(n == 1 for n in scale.shape):
        return height, width  # one scale for the whole matrix
    else:
        wanted, found = [(height, 1), (height,)], (1, width)  # one for each row
    if scale.shape not in wanted:
        raise RefusedError(
            f"{path(scale)}: scale {scale.name} has shape {list(scale.shape)}, expected "
            f"{list(wanted[0])} for {weight.name} of shape {list(weight.shape)}"
        )
    return found


def apply_scale(values: Float32, first: int, width: int, scale: Scale, grid: Float32) -> None:
    """Multiply elements ``[first, first + len(values))`` of a matrix of ``width`` columns.

    The product of code and scale is taken in float32, row by row.
    """
    done = 0
    while done < len(values):
        row, column = divmod(first + done, width)
        count = min(width - column, len(values) - done)
        factors = grid[row // scale.rows].repeat(scale.columns)[column : column + count]
        values[done : done + count] *= factors
        done += count
