"""Damage a store in every way that one file can be damaged, and print what is found, and when.

Run it at the root of a checkout: PYTHONPATH=. python scripts/flip_bits.py FOLDER --flips 500

For each kind of store: one flipped bit in every file that a retained generation consists of, then
FLIPS more bits of chance, then every file deleted, too short, too long, zeroed, of an earlier
generation, unreadable, or exchanged with another of its length. After each the file must be as it
was, and after some the whole store. FOLDER should be in memory; all is removed at the end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from tests.support.bad_bytes import (
    KINDS,
    STAGES,
    Damage,
    any_flip,
    bits,
    flip,
    judge,
    make_trained,
    other_damage,
    verified,
)
from tests.support.byte_map import byte_map
from tests.support.tiering_stores import small_chunks

Counts = dict[str, Counter[str]]

_COLUMNS = (*STAGES, "not found", "wrongly named")
_WHOLE_EVERY = 25  # after so many the store is read again; after each, what was damaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to work")
    parser.add_argument("--flips", type=int, default=500, help="of chance, in each kind of store")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="of stores")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts: Counts = {}
    for name in options.kinds:
        with tempfile.TemporaryDirectory(dir=options.folder) as base, small_chunks():
            Path(base).chmod(0o755)  # for whoever may not read the files
            store = make_trained(Path(base) / "made", KINDS[name]).store
            with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
                jobs = [(name, store, Path(base) / str(n), n, options) for n in range(options.jobs)]
                for part in pool.starmap(try_share, jobs):
                    for title, row in part.items():
                        counts.setdefault(title, Counter()).update(row)
    print_table(counts)
    sys.exit(any(row["not found"] or row["wrongly named"] for row in counts.values()))


def try_share(name: str, made: Path, base: Path, job: int, options: argparse.Namespace) -> Counts:
    """Try what falls to one job on a copy of its own, and count."""
    counts: Counts = {}
    store = copied(made, base)
    whole = {path: state_of(path) for path in byte_map(store)}
    damages = every_damage(store, options.flips, random.Random(options.seed))
    for number, damage in enumerate(islice(damages, job, None, options.jobs)):
        verdict = judge(store, damage)
        row = counts.setdefault(row_of(damage), Counter())
        row[verdict.stage or "not found"] += 1
        row["wrongly named"] += bool(verdict.wrong)
        if verdict.wrong or not verdict.stage:
            paths = [str(file.path.relative_to(base)) for file in damage.files]
            print(name, damage.what, paths, damage.offset, verdict, file=sys.stderr, flush=True)
        if any(state_of(file.path) != whole[file.path] for file in damage.files):
            raise RuntimeError(f"{damage} was not undone")
        if number % _WHOLE_EVERY == 0:
            print(f"{name}, job {job}: {number} damages", file=sys.stderr, flush=True)
            require_whole(store)
    require_whole(store)
    return counts


def copied(store: Path, base: Path) -> Path:
    """Return a copy of a store and of the drives beside it, which its links lead to."""
    shutil.copytree(store.parent, base, symlinks=True)
    copy = base / store.name
    for link in sorted((copy / "drives").iterdir()):
        target = base / link.readlink().relative_to(store.parent)
        link.unlink()
        link.symlink_to(target)
    return copy


def every_damage(store: Path, flips: int, rng: random.Random) -> Iterator[Damage]:
    files = list(byte_map(store).values())
    for file in files:
        yield flip(file, rng.randrange(bits(file)))
    for _ in range(flips):
        yield any_flip(files, rng)
    yield from other_damage(store)


def state_of(path: Path) -> tuple[int, str, bytes]:
    """Return mode, target and content of a file or link."""
    mode, link = path.lstat().st_mode, path.is_symlink()
    return mode, str(path.readlink()) if link else "", b"" if link else path.read_bytes()


def require_whole(store: Path) -> None:
    code, findings, said = verified(store, "--deep")
    if code:
        raise RuntimeError(f"{store} did not become whole again: {findings} {said}")


def row_of(damage: Damage) -> str:
    """Return what a damage counts as: flipped bits by where they are, all else by what it is."""
    [file, *_] = damage.files
    if damage.offset is None:
        return damage.what
    part = f", {file.region(damage.offset).what}" if file.regions else ""
    return f"{damage.what}: {file.kind}{part}"


def print_table(counts: Mapping[str, Counter[str]]) -> None:
    print(f"| damage | cases | {' | '.join(_COLUMNS)} |\n|{'---|' * (len(_COLUMNS) + 2)}")
    for title, row in sorted(counts.items()):
        print_row(title, row)
    flips = sum((row for name, row in counts.items() if "bit" in name), Counter())
    print_row("all flipped bits", flips)
    print_row("everything", sum(counts.values(), Counter()))


def print_row(title: str, row: Mapping[str, int]) -> None:
    cases = sum(row[stage] for stage in (*STAGES, "not found"))
    print(f"| {title} | {cases} | {' | '.join(str(row[column]) for column in _COLUMNS)} |")


if __name__ == "__main__":
    main()
