from __future__ import annotations

from itertools import product

import pytest

from tiering.placement import place
from tiering.records import Record, Tier

WEIGHTS = {f"w{i}" for i in range(4)}


def records() -> list[Record]:
    weights = [Record(name=name, dtype="bfloat16", length=2048) for name in sorted(WEIGHTS)]
    return weights + [Record(name=f"m{i}", dtype="float32", length=2048) for i in range(4)]


def placed(pinned: int, cxl: int) -> dict[str, Tier]:
    budgets = {Tier.PINNED: pinned * 4096, Tier.CXL: cxl * 4096}
    return dict(place(records(), budgets, tolerant=WEIGHTS))


def names(places: dict[str, Tier], tier: Tier) -> str:
    return " ".join(name for name, where in places.items() if where is tier)


@pytest.mark.parametrize(
    ("pinned", "cxl", "in_pinned", "in_cxl"),
    [
        (2, 0, "w0 w1", ""),
        (0, 2, "", "w0 w1"),
        (2, 1, "w0 w1", "w2"),
        (12, 4, "w0 w1 w2 w3 m0 m1 m2 m3", ""),
        (8, 4, "m0 m1 m2 m3", "w0 w1 w2 w3"),
        (10, 9, "w0 w1 m0 m1 m2 m3", "w2 w3"),
        (4, 9, "m0 m1", "w0 w1 w2 w3"),
    ],
)
def test_weights_come_first_and_give_way_to_what_cxl_does_not_suit(pinned, cxl, in_pinned, in_cxl):
    found = placed(pinned, cxl)
    assert names(found, Tier.PINNED) == in_pinned
    assert names(found, Tier.CXL) == in_cxl


def test_no_budget_is_exceeded_and_no_state_is_in_cxl():
    by_name = {record.name: record.padded_nbytes for record in records()}
    for pinned, cxl in product(range(14), range(10)):
        found = placed(pinned, cxl)
        for tier, pages in ((Tier.PINNED, pinned), (Tier.CXL, cxl)):
            held = [by_name[name] for name, where in found.items() if where is tier]
            assert sum(held) <= pages * 4096
        assert set(names(found, Tier.CXL).split()) <= WEIGHTS


def test_more_of_either_memory_never_leaves_more_on_drives():
    by_name = {record.name: record.padded_nbytes for record in records()}

    def on_drives(pinned: int, cxl: int) -> int:
        left = names(placed(pinned, cxl), Tier.NVME).split()
        return sum(by_name[name] for name in left)

    for pinned, cxl in product(range(0, 14, 2), range(9)):
        assert on_drives(pinned, cxl + 1) <= on_drives(pinned, cxl)
        assert on_drives(pinned + 2, cxl) <= on_drives(pinned, cxl)
