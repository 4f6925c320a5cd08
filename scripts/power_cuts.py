"""Enumerate what a power cut may leave of everything that changes a store, and check all of it.

    PYTHONPATH=. nice python scripts/power_cuts.py  # every scenario, thoroughly
    PYTHONPATH=. nice python scripts/power_cuts.py commits --needed  # which sync is needed for what

Needs root: each drive is a file system of its own, in memory.
"""

from __future__ import annotations

import argparse
import collections
import logging
import re
import time
from collections.abc import Iterator

from tests.support.power_cut import History, Recording, Sync
from tests.support.power_cut_files import BESIDE_STORES
from tests.support.power_cut_images import QUICK, THOROUGH, Bounds, Search, Violation
from tests.support.power_cut_scenarios import SCENARIOS, Scenario, Workplace, workplace

EVERYTHING = {**SCENARIOS, **BESIDE_STORES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=list(EVERYTHING), help="default: all")
    parser.add_argument("--needed", action="store_true", help="leave out each sync in turn")
    parser.add_argument("--quick", action="store_true", help="fewer images")
    parser.add_argument("--no-kills", action="store_true", help="no kill before the cut")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for name in arguments.scenarios:
        if arguments.needed:
            show_needed(name)
        else:
            kills = name in SCENARIOS and not arguments.no_kills
            show_counts(name, QUICK if arguments.quick else THOROUGH, kills=kills)


def show_counts(name: str, bounds: Bounds, *, kills: bool) -> None:
    """Print how many images there were, and each kind of violation once."""
    begin = time.process_time()
    with workplace() as place:
        scenario = EVERYTHING[name](place)
        search = Search(check=scenario.check, bounds=bounds, collect=True)
        recording = scenario.record()
        count = search.run(History(recording))
        if kills:
            resume_everywhere(scenario, recording, search)
    print(f"{name}: {count}, {time.process_time() - begin:.0f} s", flush=True)
    kinds = collections.Counter(plain(str(v.error)) for v in search.violations)
    for kind, times in kinds.most_common():
        example = next(v for v in search.violations if plain(str(v.error)) == kind)
        print(f"  {times} violations like: {example}")


def resume_everywhere(scenario: Scenario, recording: Recording, search: Search) -> None:
    """Kill it before each of its steps, go on after that, then cut the power."""
    for step in recording.steps:
        history = History(scenario.resume(recording, step.begin))
        search.run(history, since=step.begin, killed=step.begin)


def plain(text: str) -> str:
    return re.sub(r"[0-9a-f]{8,}|tmp\w+|\d+", "#", text)[:120]


def show_needed(name: str) -> None:
    """Print for each sync what goes wrong without it."""
    with workplace() as place:
        for scenario, history, since, title in histories(name, place):
            print(f"{title}\n| where | sync | without it |\n|---|---|---|", flush=True)
            searched = Search(check=scenario.check, bounds=QUICK)
            searched.run(history, since=since)
            for sync in history.syncs:
                if sync.step.begin > since:
                    found = without(history, sync, scenario, since)
                    print(f"| {sync.step.where} | {described(sync)} | {found} |", flush=True)


def histories(name: str, place: Workplace) -> Iterator[tuple[Scenario, History, int, str]]:
    scenario = EVERYTHING[name](place)
    recording = scenario.record()
    yield scenario, History(recording), 0, name
    if name == "commits":
        rename = [s for s in recording.steps if s.operation.path.name == "zarr.json"]
        time = next(s.begin for s in rename if s.operation.action == "rename")
        resumed = scenario.resume(recording, time)
        yield scenario, History(resumed), time, f"{name}, killed after the rename"


def described(sync: Sync) -> str:
    return re.sub(r"megatrain-\w+", "FOLDER", re.sub(r"tmp\w+/", "", str(sync.step)))


def without(history: History, sync: Sync, scenario: Scenario, since: int) -> str:
    for bounds in (QUICK, THOROUGH):
        try:
            Search(check=scenario.check, bounds=bounds).run(history.without(sync), since=since)
        except Violation as violation:
            return shortened(f"{type(violation.error).__name__}: {violation.error}")
    return "nothing found"


def shortened(text: str) -> str:
    text = re.sub(r"/\S*/(?=store)", "", " ".join(text.split()))
    return re.sub(r"[0-9a-f]{9,}", "...", text)[:110].replace("|", "/")


if __name__ == "__main__":
    main()
