from __future__ import annotations

import numpy as np
import pytest
import torch

from checkpoint.codec import decode, encode, round_to_bfloat16

ALL_BITS = np.arange(1 << 16, dtype=np.uint32).astype("<u2")


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_value_survives_a_master(dtype: str) -> None:
    master = np.empty(1 << 16, np.float32)
    decode(ALL_BITS.view(np.uint8), dtype, master)
    back = np.empty(2 << 16, np.uint8)
    encode(master, dtype, back)
    assert np.array_equal(back.view("<u2"), ALL_BITS)


def test_a_float32_is_its_own_master() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
    master = np.empty(4096, np.float32)
    decode(bits.view(np.uint8), "F32", master)
    assert np.array_equal(master.view(np.uint32), bits)


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    ties = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000
    values = np.concatenate([bits, ties, ties + 1, ties - 1]).view(np.float32)
    values = values[~np.isnan(values)]
    out = np.empty(len(values), np.uint16)
    round_to_bfloat16(values, out)
    wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(out, wanted)


def test_a_nan_stays_a_nan() -> None:
    values = np.array([0x7F800001, 0xFF80FFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    out = np.empty(3, np.uint16)
    round_to_bfloat16(values, out)
    assert ((out & 0x7FFF) > 0x7F80).all()
