"""The command: examine, then show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from checkpoint.sizes import parse_size
from megatrain.doctor.burn import Progress
from megatrain.doctor.examine import examine
from megatrain.doctor.findings import Section
from megatrain.doctor.report import document, is_fine, section_report, summary
from tiering.errors import UsageError

_WIDTH_OF_A_FILE = 120


def diagnose(drives: Sequence[Path], *, burn: str | None, as_json: bool) -> bool:
    """Print what is found; return whether nothing asks for action."""
    with _progress() as on_progress:
        found = examine(drives, burn=_size(burn), on_progress=on_progress)
        sections = list(found) if as_json else list(_shown(found))
    if as_json:
        click.echo(json.dumps(document(sections), indent=1))
    else:
        click.echo(summary(sections))
    return is_fine(sections)


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise UsageError(f"--burn: {error}") from error
    if not nbytes:
        raise UsageError("--burn 0: write 50GiB, for example")
    return nbytes


def _shown(found: Iterable[Section]) -> Iterator[Section]:
    """Print each section as soon as it is known."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    for section in found:
        console.print(section_report(section))
        yield section


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show bytes, rate and time left of a long write on standard error, if that is a terminal."""
    from tqdm import tqdm

    bars: list[tqdm[Any]] = []

    def on_progress(done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(desc="burning", unit="B", unit_scale=True, leave=False, disable=None))
        bars[0].total = total
        bars[0].update(done - bars[0].n)
        if done >= total:
            bars.pop().close()

    try:
        yield on_progress
    finally:
        for bar in bars:
            bar.close()
