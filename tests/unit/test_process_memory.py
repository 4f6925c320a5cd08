from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from megatrain.allocator import HeapKeeper
from tiering.limits import lock_limit
from tiering.process import PeakMeter, resident_nbytes

MIB = 1 << 20


@pytest.mark.parametrize("exact", [True, False])
def test_a_peak_is_seen_in_its_own_lap(exact: bool) -> None:
    with PeakMeter(exact=exact) as meter:
        before = meter.lap()
        with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            for start in range(0, len(pages), 4096):
                pages[start] = 1
            if not exact:
                assert not meter.exact
                assert resident_nbytes() >= before + 60 * MIB
                assert meter.lap() >= before + 60 * MIB
        if exact and meter.exact:
            assert meter.lap() >= before + 60 * MIB
        meter.lap()
        assert meter.lap() < before + 30 * MIB


def process_of(folder: Path, *, capabilities: int, uids: str) -> Path:
    (folder / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    (folder / "uid_map").write_text(uids)
    return folder


def limits_of(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (soft, soft))


def test_the_lock_limit_is_lifted_by_the_capability_only_where_it_counts(tmp_path, monkeypatch):
    limits_of(monkeypatch, 8 * MIB)
    everybody = "         0          0 4294967295\n"
    assert lock_limit(process_of(tmp_path, capabilities=1 << 14, uids=everybody)) is None
    for capabilities, uids in ((0, everybody), (1 << 14, "0 1000 1\n")):
        found = lock_limit(process_of(tmp_path, capabilities=capabilities, uids=uids))
        assert found is not None
        assert (found.nbytes, found.source) == (8 * MIB, "RLIMIT_MEMLOCK")
    limits_of(monkeypatch, -1)
    assert lock_limit(process_of(tmp_path, capabilities=0, uids=everybody)) is None


def test_the_heap_is_trimmed_between_parts_and_beyond_the_limit_only():
    trims: list[int] = []
    keeper = HeapKeeper(1 << 62, trim=lambda: trims.append(1))
    for part in ("layers", "layers", "head", "layers", "layers"):
        keeper.before(part)
    assert len(trims) == 3
    tight = HeapKeeper(1, trim=lambda: trims.append(1))
    for _ in range(4):
        tight.before("layers")
    assert len(trims) == 7
