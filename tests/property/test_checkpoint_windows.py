from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.schema import pack
from checkpoint.windows import PIECE_LENGTH, PIECE_MULTIPLE, piece_length, windows
from tiering.errors import UsageError


@given(
    lengths=st.lists(st.integers(0, 400), max_size=8),
    piece=st.integers(1, 500),
)
def test_windows_cover_every_element_of_every_tensor_once(lengths: list[int], piece: int) -> None:
    unit = pack("u", ((str(i), (length,), "F32") for i, length in enumerate(lengths)))
    found = np.zeros(unit.length, np.int64)
    at = 0
    for window in windows(unit, piece):
        assert window.start == at
        assert 0 < window.length <= piece
        for span in window.spans:
            elements = span.tensor.offset + np.arange(span.first, span.last)
            places = window.start + np.arange(span.start, span.stop)
            assert np.array_equal(elements, places)
            assert span.stop <= window.length
            found[places] += 1 + int(span.tensor.name)
        at += window.length
    assert at == unit.length
    wanted = np.zeros(unit.length, np.int64)
    for tensor in unit.tensors:
        wanted[tensor.offset : tensor.end] = 1 + int(tensor.name)
    assert np.array_equal(found, wanted)


@given(ram=st.integers(PIECE_MULTIPLE * 14, 1 << 30))
def test_pieces_stay_within_the_memory_they_are_given(ram: int) -> None:
    length = piece_length(ram, 14)
    assert 0 < length <= PIECE_LENGTH
    assert length * 14 <= ram
    assert length % PIECE_MULTIPLE == 0


def test_too_little_memory_for_one_piece_is_an_error() -> None:
    with pytest.raises(UsageError, match="the smallest piece needs 57344 B"):
        piece_length(1000, 14)
