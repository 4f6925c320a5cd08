from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.records import Record
from tiering.shares import Room, capped, spread
from tiering.slots import Places

ROLES = (
    ("weights", "bfloat16"),
    ("master", "float32"),
    ("exp_avg", "float32"),
    ("exp_avg_sq", "float32"),
)


def _model(layers: int, layer: int, vocabulary: int, shard_nbytes: int = 64 << 20) -> list[Record]:
    """Return the records of a decoder: equal layers between two tables."""
    sizes = {"outer_in": vocabulary, "outer_out": vocabulary // 2}
    sizes |= {f"layer.{i:03}": layer for i in range(layers)}
    return [
        Record(name=f"{unit}.{role}", dtype=dtype, length=length, shard_nbytes=shard_nbytes)
        for unit, length in sizes.items()
        for role, dtype in ROLES
    ]


def _shards(records: Sequence[Record]) -> list[tuple[str, int, int]]:
    """Return record, shard and bytes of every shard."""
    return [
        (r.name, i, min(r.geometry.shard_nbytes, r.nbytes - i * r.geometry.shard_nbytes))
        for r in records
        for i in range(r.geometry.shard_count)
    ]


def _nbytes(records: Sequence[Record], places: Places) -> dict[int, int]:
    found: dict[int, int] = {}
    for name, shard, nbytes in _shards(records):
        found[places[name][shard]] = found.get(places[name][shard], 0) + nbytes
    return found


def _assert_balanced(records: Sequence[Record], shares: Mapping[int, float], p: Places) -> None:
    found, total, whole = _nbytes(records, p), sum(r.nbytes for r in records), sum(shares.values())
    for number, share in shares.items():
        assert found.get(number, 0) == pytest.approx(share / whole * total, rel=0.1)


LEAST = 0.05


def _at_least(weights: list[float]) -> dict[int, float]:
    """Return shares in proportion to weights, above the least; the numbers have gaps."""
    left = 1 - LEAST * len(weights)
    return {2 * i + 1: LEAST + left * w / sum(weights) for i, w in enumerate(weights)}


SHARES = st.lists(st.floats(0.01, 1), min_size=2, max_size=8).map(_at_least)
RECORDS = st.one_of(
    st.builds(
        _model,
        layers=st.integers(24, 36),
        layer=st.integers(14 << 20, 40 << 20),
        vocabulary=st.integers(1 << 20, 200 << 20),
    ),
    st.lists(st.integers(1 << 17, 1 << 20), min_size=600, max_size=600).map(
        lambda lengths: [
            Record(name=f"r{i}", dtype="float32", length=n) for i, n in enumerate(lengths)
        ]
    ),
)


@settings(max_examples=25, deadline=None)
@given(records=RECORDS, shares=SHARES)
def test_every_drive_gets_its_share_and_equal_arguments_give_equal_places(
    records: list[Record], shares: dict[int, float]
) -> None:
    places = spread(records, shares)
    _assert_balanced(records, shares, places)
    assert spread(records, shares) == places
    assert spread(records, shares, places) == places, "what lies right stays"


@settings(max_examples=25, deadline=None)
@given(records=RECORDS, before=SHARES, after=SHARES)
def test_a_new_spread_is_balanced_wherever_the_shards_were(
    records: list[Record], before: dict[int, float], after: dict[int, float]
) -> None:
    places = spread(records, after, spread(records, before))
    _assert_balanced(records, after, places)
    assert spread(records, after, places) == places


@pytest.mark.parametrize("drives", [2, 3, 4])
def test_shards_that_follow_each_other_lie_on_different_drives(drives: int) -> None:
    records = _model(24, 40 << 20, 150 << 20)
    places = spread(records, dict.fromkeys(range(drives), 1 / drives))
    pairs = [pair for found in places.values() for pair in itertools.pairwise(found)]
    assert sum(a == b for a, b in pairs) <= 0.1 * len(pairs)


@pytest.mark.parametrize("drives", [2, 3, 4, 6])
@pytest.mark.parametrize("length", [3_540_096, 45_000_000, 218_000_000, 855_638_016])
def test_the_state_of_a_unit_comes_from_several_drives_at_once(drives: int, length: int) -> None:
    """An update reads and writes its records side by side."""
    roles = ("master", "exp_avg", "exp_avg_sq")
    records = [
        Record(name=f"{i}.{role}", dtype=dtype, length=length)
        for i in range(12)
        for role, dtype in [("weights", "bfloat16"), *((role, "float32") for role in roles)]
    ]
    places = spread(records, dict.fromkeys(range(drives), 1 / drives))
    busy = [
        len(set(found))
        for i in range(12)
        for found in zip(*(places[f"{i}.{role}"] for role in roles), strict=True)
    ]
    assert sum(busy) / len(busy) >= 0.8 * min(drives, len(roles))


def test_a_further_drive_takes_only_its_share_from_the_others() -> None:
    records = _model(32, 40 << 20, 150 << 20)
    before = spread(records, {0: 0.5, 1: 0.5})
    after = spread(records, {0: 0.4, 1: 0.4, 2: 0.2}, before)
    moved = [n for name, i, n in _shards(records) if before[name][i] != after[name][i]]
    assert sum(moved) <= 0.3 * sum(record.nbytes for record in records)


def test_a_drive_without_a_share_gets_nothing() -> None:
    records = _model(4, 1 << 20, 1 << 20)
    assert set(_nbytes(records, spread(records, {0: 0.0, 4: 1.0}))) == {4}


ROOMS = st.lists(
    st.builds(
        Room,
        bytes_per_s=st.floats(0, 1e10),
        free_nbytes=st.integers(0, 1 << 40),
        device=st.integers(0, 4),
    ),
    min_size=2,
    max_size=8,
)


@settings(deadline=None)
@given(rooms=ROOMS, nbytes=st.integers(1, 1 << 41))
def test_shares_add_up_and_fit_the_free_bytes_of_each_file_system(
    rooms: list[Room], nbytes: int
) -> None:
    free = {room.device: room.free_nbytes for room in rooms}
    rooms = [
        Room(bytes_per_s=r.bytes_per_s, free_nbytes=free[r.device], device=r.device) for r in rooms
    ]
    shares = capped(dict(enumerate(rooms)), nbytes)
    assert sum(shares.values()) == pytest.approx(1, abs=0.001)
    if sum(free.values()) > nbytes:
        for device in free:
            share = sum(s for n, s in shares.items() if rooms[n].device == device)
            assert share * nbytes <= free[device] + 0.001 * nbytes


def test_shares_are_in_proportion_to_rates_and_a_full_drive_leaves_the_rest_to_the_others() -> None:
    def room(rate: float, free: int, device: int) -> Room:
        return Room(bytes_per_s=rate, free_nbytes=free, device=device)

    plenty = {0: room(3e9, 10**12, 0), 1: room(1e9, 10**12, 1)}
    assert capped(plenty, 10**9) == {0: 0.75, 1: 0.25}
    tight = {0: room(3e9, 10**8, 0), 1: room(1e9, 10**12, 1), 2: room(1e9, 10**12, 2)}
    assert capped(tight, 10**9) == {0: 0.1, 1: 0.45, 2: 0.45}
    shared = {0: room(3e9, 4 * 10**8, 0), 1: room(1e9, 4 * 10**8, 0), 2: room(1e9, 10**12, 1)}
    assert capped(shared, 10**9) == {0: 0.3, 1: 0.1, 2: 0.6}
