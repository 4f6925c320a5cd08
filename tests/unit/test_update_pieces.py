from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.schema import pack
from megatrain.shape import PIECE
from megatrain.streaming import extents
from megatrain.update import pieces, put_rows
from tiering.records import ALIGNMENT

lengths = st.lists(st.integers(0, 3 * PIECE), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(lengths, st.integers(1, 3))
def test_cuts_do_not_depend_on_the_slabs_but_at_multiples_the_kernel_does_not_see(sizes, slab):
    unit = pack("u", [(f"t{i}", (n,), "F32") for i, n in enumerate(sizes)])
    step = slab * PIECE
    found = [
        (tensor.name, a - tensor.offset, b - tensor.offset)
        for start in range(0, unit.length, step)
        for tensor, a, b in pieces(unit.tensors, start, min(start + step, unit.length))
    ]
    for tensor in unit.tensors:
        cuts = [(a, b) for name, a, b in found if name == tensor.name]
        assert [a for a, _ in cuts[1:]] == [b for _, b in cuts[:-1]]
        assert sum(b - a for a, b in cuts) == tensor.length
        assert all(a % 64 == 0 and b - a <= PIECE for a, b in cuts)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 40), min_size=1), st.integers(0, 300), st.integers(1, 500))
def test_rows_land_where_the_table_has_them(ids, start, length):
    hidden, words = 12, 41
    tokens = np.array(sorted(ids))
    rows = torch.arange(len(tokens) * hidden, dtype=torch.float32) + 1
    table = torch.zeros(words * hidden)
    table.view(words, hidden)[torch.from_numpy(tokens)] = rows.view(-1, hidden)
    stop = min(start + length, words * hidden)
    grad = torch.zeros(max(0, stop - start))
    put_rows(grad, rows, tokens, start=start, hidden=hidden)
    assert torch.equal(grad, table[start:stop])


@settings(max_examples=100, deadline=None)
@given(
    st.sets(st.integers(0, 5000), min_size=1, max_size=60),
    st.sampled_from([2, 64, 1152, 4096, 10_000]),
)
def test_row_reads_are_aligned_bounded_and_cover_every_row(ids, row):
    tokens = sorted(ids)
    most = max(-(-row // ALIGNMENT) * ALIGNMENT + ALIGNMENT, 16384)
    seen = 0
    for first, last, start, stop in extents(tokens, row, most):
        assert first == seen
        seen = last
        assert start % ALIGNMENT == stop % ALIGNMENT == 0
        assert 0 < stop - start <= most
        for token in tokens[first:last]:
            assert start <= token * row
            assert (token + 1) * row <= stop
    assert seen == len(tokens)
