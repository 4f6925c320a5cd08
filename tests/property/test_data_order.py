from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data.order import Order, permutation, steps_per_epoch, window

sizes = st.integers(1, 60)
batch = st.integers(1, 9)


def consume(order: Order, cursor: int, n: int, end: int) -> list[int]:
    used: list[int] = []
    while cursor < end:
        indices, _ = order.window(cursor, n)
        used += indices
        cursor += len(indices)
    return used


@settings(deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 9), st.text(max_size=9), sizes)
def test_an_epoch_takes_every_sample_once(seed: int, epoch: int, fingerprint: str, size: int):
    assert sorted(permutation(seed, epoch, fingerprint, size)) == list(range(size))


@settings(deadline=None)
@given(sizes, batch, batch, st.integers(0, 180), st.booleans())
def test_going_on_from_any_cursor_gives_the_uninterrupted_order(size, n, other, stop, shuffle):
    order = Order(size=size, fingerprint="f", shuffle=shuffle)
    whole = consume(order, 0, n, 3 * size)
    assert whole[stop:] == consume(order, stop, other, 3 * size) or stop >= 3 * size


@settings(deadline=None)
@given(sizes, batch, st.integers(0, 500))
def test_a_window_is_full_or_ends_its_epoch(size: int, n: int, cursor: int):
    positions, epoch = window(cursor, size, n)
    assert epoch == cursor // size
    assert positions.start == cursor % size
    assert len(positions) == n or positions.stop == size
    assert 0 < len(positions) <= n


@settings(deadline=None)
@given(sizes, batch)
def test_steps_per_epoch_count_the_short_last_window(size: int, n: int):
    cursor = steps = 0
    while cursor < size:
        cursor += len(window(cursor, size, n)[0])
        steps += 1
    assert steps == steps_per_epoch(size, n)


def test_the_order_is_the_same_on_every_machine_and_release():
    assert permutation(0, 0, "golden", 8).tolist() == GOLDEN


def test_seed_epoch_and_data_each_change_the_order():
    base = permutation(0, 0, "f", 64)
    for other in (
        permutation(1, 0, "f", 64),
        permutation(0, 1, "f", 64),
        permutation(0, 0, "g", 64),
    ):
        assert not np.array_equal(base, other)


def test_without_shuffling_samples_come_as_they_lie_in_the_file():
    order = Order(size=5, fingerprint="f", shuffle=False)
    assert [order.window(cursor, 2) for cursor in (0, 2, 4, 5)] == [
        ((0, 1), 0),
        ((2, 3), 0),
        ((4,), 0),
        ((0, 1), 1),
    ]


GOLDEN = [6, 3, 0, 7, 1, 4, 5, 2]
