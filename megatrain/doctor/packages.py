"""Whether another package or a stray file takes a name that is ours."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import all_suffixes
from importlib.metadata import packages_distributions
from pathlib import Path

from megatrain.doctor.findings import Finding, Verdict

_OURS = ("megatrain", "checkpoint", "tiering")
_DISTRIBUTION = "megatrain"


def package_findings(folder: Path, path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Say who else has a top-level module of our names.

    ``folder`` is the current folder: python -m and python -c look there first.
    """
    found = [
        *foreign(packages_distributions()),
        *shadows({name: _home(name) for name in _OURS}, sys.path if path is None else path, folder),
    ]
    yield from found
    if not found:
        yield Finding(
            subject="names",
            verdict=Verdict.OK,
            found=f"{', '.join(_OURS)}: nothing else here has these names",
        )


def _home(name: str) -> Path:
    module = importlib.import_module(name)
    assert module.__file__
    return Path(module.__file__).resolve().parent


def foreign(distributions: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Say which other distributions install a top-level module of our names."""
    for name in _OURS:
        for other in sorted(set(distributions.get(name, ())) - {_DISTRIBUTION}):
            yield Finding(
                subject=name,
                verdict=Verdict.PROBLEM,
                found=f"the package {other} installs a top-level module {name} too",
                advice=f"their files mix or one hides the other: pip uninstall {other}, or use a "
                "virtual environment of its own",
            )


def shadows(homes: Mapping[str, Path], path: Iterable[str], folder: Path) -> Iterator[Finding]:
    """Say which files would be imported in place of ours, and from where."""
    searched = {Path(entry or ".").resolve() for entry in path}
    here = folder.resolve()
    for name, home in homes.items():
        for place in sorted(searched | {here}):
            for file in _modules(place, name):
                if home not in (file.parent, file.resolve().parent):
                    yield _shadow(name, file, home, place in searched)


def _modules(place: Path, name: str) -> Iterator[Path]:
    """Yield what "import name" would take from a folder; a folder of data is no package."""
    candidates = [place / name / f"__init__{suffix}" for suffix in all_suffixes()]
    candidates += [place / f"{name}{suffix}" for suffix in all_suffixes()]
    yield from (file for file in candidates if file.is_file())


def _shadow(name: str, file: Path, home: Path, searched: bool) -> Finding:
    where = "on Python's path" if searched else "in the current folder, where python -m looks first"
    return Finding(
        subject=name,
        verdict=Verdict.WARNING,
        found=f"{file} is {where}; ours is {home}",
        advice="a program can get the one for the other: rename it, or start elsewhere",
    )
