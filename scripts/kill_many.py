"""Kill whole commands by the thousand, go on after each kill, and compare what comes out.

Run it at the root of a checkout: PYTHONPATH=. python scripts/kill_many.py FOLDER --kills 1000

A kill is a SIGKILL at a moment of chance, while a lane works, just before a system call or in the
middle of its bytes; up to six in a row hit one command before it is left alone. FOLDER/kills.jsonl
keeps the stories: several of these may work in one FOLDER, and an interrupted one goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.children import Children
from tests.support.faults import build_shim
from tests.support.kill_trials import any_story
from tests.support.programs import PROGRAMS, Site

Stories = Sequence[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to work and to keep the stories")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--programs", nargs="*", default=[kind.name for kind in PROGRAMS])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder instead of a tiny model")
    parser.add_argument("--ram", default="64MiB", help="memory.ram of the runs")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="then a command hangs")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    log = options.folder / "kills.jsonl"
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as base,
        Children(build_shim(Path(base)), timeout_s=options.timeout_s) as children,
    ):
        site = Site(Path(base), options.model, options.ram)
        work(site, children, log, options)
    stories = read(log)
    print_summary(stories)
    sys.exit(any(story["wrong"] for story in stories))


def work(site: Site, children: Children, log: Path, options: argparse.Namespace) -> None:
    """Add stories, of one program after another, until there are enough kills."""
    rng = random.Random(os.urandom(8))
    made = [kind(site, children) for kind in PROGRAMS if kind.name in options.programs]
    while (done := kills(read(log))) < options.kills:
        print(f"{done} kills", file=sys.stderr, flush=True)
        for program in made:
            story = any_story(program, children, rng)
            if story.wrong:
                print(story, file=sys.stderr, flush=True)
            add(log, asdict(story))


def add(log: Path, story: dict[str, Any]) -> None:
    """Add one line, whole beside those of other processes."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(fd, (json.dumps(story) + "\n").encode())
    finally:
        os.close(fd)


def read(log: Path) -> Stories:
    if not log.exists():
        return []
    lines = log.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


def kills(stories: Stories) -> int:
    return sum(len(story["kills"]) for story in stories)


def print_summary(stories: Stories) -> None:
    wrong = [story["wrong"] for story in stories if story["wrong"]]
    unopenable = sum("cannot be opened" in text for text in wrong)
    print(f"| command | kills | stories | unopenable | different or stuck |\n{'|---' * 5}|")
    for program in dict.fromkeys(story["program"] for story in stories):
        own = [story for story in stories if story["program"] == program]
        closed = sum("cannot be opened" in story["wrong"] for story in own)
        bad = sum(bool(story["wrong"]) for story in own) - closed
        print(f"| {program} | {kills(own)} | {len(own)} | {closed} | {bad} |")
    other = len(wrong) - unopenable
    print(f"| all | {kills(stories)} | {len(stories)} | {unopenable} | {other} |\n")
    every = [kill for story in stories for kill in story["kills"]]
    print_counts("lane at work", (lane for kill in every for lane in kill["lanes"]))
    print_counts("the call before", (kill["stage"] for kill in every if not kill["lanes"]))
    print_counts("how", (kill["how"] for kill in every))


def print_counts(title: str, found: Iterable[str]) -> None:
    print(f"| {title} | kills |\n|---|---|")
    for name, count in sorted(Counter(found).items()):
        print(f"| {name} | {count} |")
    print()


if __name__ == "__main__":
    main()
