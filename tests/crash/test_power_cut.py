"""A power cut anywhere in whatever changes a store leaves one whole generation, the old or the new.

All images of it: scripts/power_cuts.py. Here those that need the least, and a draw of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.support.power_cut import SYNCS, History, Recording
from tests.support.power_cut_files import BESIDE_STORES
from tests.support.power_cut_images import QUICK, Search, Violation
from tests.support.power_cut_scenarios import SCENARIOS, Scenario, Workplace, workplace

Record = Callable[[str, object], None]

LONG = ("move, two retained", "commits, a spare slot")  # alike, and all of it in the script
ALL = {**SCENARIOS, **BESIDE_STORES}
KILLS = 3  # of each scenario
NOT_RESUMED = ("metrics", "convert")


@pytest.fixture(name="place")
def _place() -> Iterator[Workplace]:
    with workplace() as place:
        yield place


@pytest.mark.root
@pytest.mark.parametrize("name", [name for name in ALL if name not in LONG])
def test_a_power_cut_leaves_the_old_or_the_new(
    place: Workplace, name: str, record_property: Record
) -> None:
    """Without a kill before it, and with one where names are visible and not durable."""
    scenario = ALL[name](place)
    recording = scenario.record()
    history = History(recording)
    assert history.visible() == History(Recording(place.folder)).visible(), "something bypassed us"
    few = name.startswith("move") or name == "convert"
    search = Search(check=scenario.check, bounds=replace(QUICK, drawn=0.0) if few else QUICK)
    search.run(history)
    for time in [] if name in NOT_RESUMED else _times_to_kill_at(history):
        search.run(History(scenario.resume(recording, time)), since=time, killed=time)
    record_property("images", str(search.count))
    assert search.count.different > 2


def _times_to_kill_at(history: History) -> list[int]:
    folders = [sync.step for sync in history.syncs if sync.step.operation.action == "fsync folder"]
    times = [step.begin for step in folders]
    return times[len(times) % KILLS :: max(1, len(times) // KILLS)]


@pytest.mark.root
@pytest.mark.parametrize("retain", [1, 2])
def test_a_kill_around_the_rename_of_the_root_and_then_a_power_cut_lose_nothing(
    place: Workplace, retain: int
) -> None:
    """The name of a root that is visible to whoever comes after a kill may be lost still."""
    scenario = place.commits(retain)
    recording = scenario.record()
    begins = [step.begin for step in recording.steps]
    rename = begins.index(_rename_of_root(recording))
    search = Search(check=scenario.check, bounds=replace(QUICK, drawn=0.0))
    for time in begins[rename - 1 : rename + 3]:
        search.run(History(scenario.resume(recording, time)), since=time, killed=time)
    assert search.count.different > 20


def _cut_after_a_kill(scenario: Scenario, recording: Recording, time: int) -> None:
    search = Search(check=scenario.check, bounds=QUICK)
    search.run(History(scenario.resume(recording, time)), since=time, killed=time)
    assert search.count.different > 2


def _rename_of_root(recording: Recording) -> int:
    return next(
        step.begin
        for step in recording.steps
        if step.operation.action == "rename" and step.operation.path.name == "zarr.json"
    )


@pytest.mark.root
def test_a_kill_before_the_last_file_of_a_slot_is_durable_and_then_a_power_cut_lose_nothing(
    place: Workplace,
) -> None:
    """The slot looks complete to whoever comes after the kill, and is written to."""
    scenario = place.repair()
    recording = scenario.record()
    last = place.store / "slots" / "1" / "zarr.json"
    time = next(
        step.begin
        for step in recording.steps
        if step.operation.action == "fsync" and step.operation.path == last
    )
    _cut_after_a_kill(scenario, recording, time)


@pytest.mark.root
def test_a_kill_before_the_removal_of_a_drive_is_durable_and_then_a_power_cut_leave_nothing(
    place: Workplace,
) -> None:
    """Whoever comes after the kill sees no folder there, and forgets that there was one."""
    scenario = place.creation_given_up()
    recording = scenario.record()
    time = next(
        step.begin
        for step in reversed(recording.steps)
        if step.operation.action == "fsync folder" and step.operation.path in place.drives.values()
    )
    _cut_after_a_kill(scenario, recording, time)


@pytest.mark.root
def test_every_sync_of_a_commit_is_needed(place: Workplace) -> None:
    scenario = place.commits(1)
    recording = scenario.record()
    begin, end = (mark.time for mark in recording.marks[2:4])
    rename = _rename_of_root(recording)
    history = History(recording)
    syncs = [sync for sync in history.syncs if begin < sync.step.begin <= end]
    assert {sync.step.operation.action for sync in syncs} == set(SYNCS)
    assert len(syncs) == 8
    for sync in syncs:
        since = max(rename, sync.step.begin)  # what was not synced matters from there on
        with pytest.raises(Violation):
            Search(check=scenario.check, bounds=QUICK).run(history.without(sync), since=since)


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
    search = Search(check=scenario.check, bounds=QUICK)
    with pytest.raises(Violation, match=r"all lost|all but rename store/zarr\.json|only remove"):
        search.run(history.without(opening), since=time)
