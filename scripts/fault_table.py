"""Make every n-th call of whole commands fail, in every way, and print a table of what came of it.

Run it at the root of a checkout: PYTHONPATH=. python scripts/fault_table.py FOLDER

A fault is made below the interpreter, in a child of a process that has imported everything. After
each the store is read deeply, the command gone on with, and what it made compared with what it
makes undisturbed. Trials are kept in FOLDER/trials.jsonl: a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from tests.support.children import Children
from tests.support.fault_trials import KINDS, FaultKind, Trial, Verdict, attempt
from tests.support.faults import build_shim
from tests.support.programs import PROGRAMS, Program, Site

COLUMNS = (
    Verdict.CLEAN,
    Verdict.HARMLESS,
    Verdict.SILENT,
    Verdict.HUNG,
    Verdict.LOST,
    Verdict.UNTOLD,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to work and to keep the trials")
    parser.add_argument("--programs", nargs="*", default=[kind.name for kind in PROGRAMS])
    parser.add_argument("--every", type=int, default=1, help="only each so many calls")
    parser.add_argument("--by-kind", action="store_true", help="a row for each kind of fault")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    log = Log(options.folder / "trials.jsonl")
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as base,
        Children(build_shim(Path(base))) as children,
    ):
        site = Site(Path(base))
        for kind in PROGRAMS:
            if kind.name in options.programs:
                try_all(kind(site, children), children, log, options.every)
    print_table(log.trials, by_kind=options.by_kind)
    sys.exit(any(not trial.verdict.allowed for trial in log.trials))


class Log:
    """The trials so far, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.trials = list(self._read())
        self._done = {(t.program, t.kind, t.number) for t in self.trials}

    def _read(self) -> Iterator[Trial]:
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                values = json.loads(line)
                yield Trial(**{**values, "verdict": Verdict(values["verdict"])})

    def has(self, program: Program, kind: FaultKind, number: int) -> bool:
        return (program.name, kind.name, number) in self._done

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")


def try_all(program: Program, children: Children, log: Log, every: int) -> None:
    for kind in KINDS:
        numbers = kind.numbers(program.calls[kind.op])[::every]
        for number in numbers:
            if log.has(program, kind, number):
                continue
            trial = attempt(program, children, kind, number)
            if trial.verdict is Verdict.HUNG:  # or the machine was: twice is no accident
                trial = attempt(program, children, kind, number)
            if not trial.verdict.allowed:
                print(trial, file=sys.stderr, flush=True)
            log.add(trial)
        print(f"{program.name}: {kind.name}: {len(numbers)}", file=sys.stderr, flush=True)


def print_table(trials: Iterable[Trial], *, by_kind: bool) -> None:
    """Print trials and what came of them; those that met no call are left out."""
    rows: dict[tuple[str, str], Counter[Verdict]] = defaultdict(Counter)
    for trial in trials:
        what = trial.kind if by_kind else trial.kind.split()[0]
        rows[trial.program, what][trial.verdict] += 1
    print(f"| command | call | tried | {' | '.join(COLUMNS)} |")
    print("|---" * (3 + len(COLUMNS)) + "|")
    for (program, what), counts in rows.items():
        counts.pop(Verdict.UNMET, None)
        cells = [program, what, counts.total(), *(counts[column] for column in COLUMNS)]
        if counts.total():
            print(f"| {' | '.join(map(str, cells))} |")
    total: Counter[Verdict] = sum(rows.values(), Counter())
    cells = ["all", "", total.total(), *(total[column] for column in COLUMNS)]
    print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
