"""A power cut anywhere in whatever changes a store leaves one whole generation, the old or the new.

All images of it: scripts/power_cuts.py. Here a draw of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.power_cut import SYNCS, History, Recording
from tests.support.power_cut_files import BESIDE_STORES
from tests.support.power_cut_images import QUICK, Search, Violation
from tests.support.power_cut_scenarios import SCENARIOS, Workplace, workplace

Record = Callable[[str, object], None]


@pytest.fixture(name="place")
def _place() -> Iterator[Workplace]:
    with workplace() as place:
        yield place


@pytest.mark.root
@pytest.mark.parametrize("name", [*SCENARIOS, *BESIDE_STORES])
def test_a_power_cut_leaves_the_old_or_the_new_generation(
    place: Workplace, name: str, record_property: Record
) -> None:
    scenario = {**SCENARIOS, **BESIDE_STORES}[name](place)
    history = History(scenario.record())
    assert history.visible() == History(Recording(place.folder)).visible(), "something bypassed us"
    search = Search(check=scenario.check, bounds=QUICK)
    record_property("images", str(search.run(history)))
    assert search.count.different > 5


@pytest.mark.root
@pytest.mark.parametrize("retain", [1, 2])
def test_a_kill_and_then_a_power_cut_leave_the_old_or_the_new_generation(
    place: Workplace, retain: int
) -> None:
    """The name of a root that is visible to whoever comes after a kill may be lost still."""
    scenario = place.commits(retain)
    recording = scenario.record()
    search = Search(check=scenario.check, bounds=QUICK)
    for time in _times_to_kill_at(recording):
        search.run(History(scenario.resume(recording, time)), since=time)
    assert search.count.different > 20


def _times_to_kill_at(recording: Recording) -> list[int]:
    """Return the times around the first rename of the root, and some before and after it."""
    begins = [step.begin for step in recording.steps]
    rename = begins.index(_rename_of_root(recording))
    return [begins[rename + k] for k in (-9, -1, 0, 1, 4, 7)]


def _rename_of_root(recording: Recording) -> int:
    return next(
        step.begin
        for step in recording.steps
        if step.operation.action == "rename" and step.operation.path.name == "zarr.json"
    )


@pytest.mark.root
def test_every_sync_of_a_commit_is_needed(place: Workplace) -> None:
    scenario = place.commits(1)
    recording = scenario.record()
    begin, end = (mark.time for mark in recording.marks[1:3])
    rename = _rename_of_root(recording)
    history = History(recording)
    syncs = [sync for sync in history.syncs if begin < sync.step.begin <= end]
    assert {sync.step.operation.action for sync in syncs} == set(SYNCS)
    assert len(syncs) == 8
    for sync in syncs:
        since = max(rename, sync.step.begin)  # what was not synced matters from there on
        with pytest.raises(Violation):
            Search(check=scenario.check).run(history.without(sync), since=since)


@pytest.mark.root
def test_opening_must_make_the_name_of_the_root_durable(place: Workplace) -> None:
    """Killed after the rename: the next writer removes what the old root needs."""
    scenario = place.commits(1)
    recording = scenario.record()
    time = _rename_of_root(recording)
    history = History(scenario.resume(recording, time))
    opening = next(
        sync
        for sync in history.syncs
        if sync.step.begin > time and sync.step.operation.path == place.store
    )
    with pytest.raises(Violation, match=r"all but rename store/zarr\.json|only remove"):
        Search(check=scenario.check).run(history.without(opening), since=time)
