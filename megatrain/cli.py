"""The command ``megatrain``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megatrain import names

try:
    from checkpoint import interrupts
    from checkpoint.cli import EXIT_FINDINGS, ErrorGroup, exit_code
    from tiering.errors import MegatrainError
except ImportError as error:
    raise names.refuse(error) from error

if TYPE_CHECKING:
    from megatrain.progress import Terminal
    from megatrain.run import Outcome, RunObserver
    from megatrain.trainer import Stop

SETS = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file."
)


@click.group(cls=ErrorGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="megatrain")
def cli() -> None:
    """Train every parameter of a language model on one device, its state on tiered storage."""


@cli.command()
@click.argument("run_file", metavar="RUN.yaml", type=click.Path(path_type=Path))
@SETS
def train(run_file: Path, sets: tuple[str, ...]) -> None:
    """Start the run that RUN.yaml describes.

    Every committed step can be gone on with by megatrain-ckpt resume. Ctrl-C and SIGTERM end the
    run after the commit of the step in progress; while the model is converted, at once. Asked
    twice, it ends at once, at the last commit.
    """
    from megatrain.config import load_run

    config = load_run(run_file, sets)
    from megatrain import run

    supervise(lambda observer, stop: run.train(config, observer, stop))


@cli.command()
@click.option(
    "--drive",
    "drives",
    multiple=True,
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder on a drive to look at; repeat for each. Default: the current folder.",
)
@click.option(
    "--burn",
    metavar="SIZE",
    help="Also write SIZE to each drive, to see its pace once its cache is full. Wears it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def doctor(ctx: click.Context, drives: tuple[Path, ...], burn: str | None, as_json: bool) -> None:
    """Say what this machine can do; exit code 1 if something is amiss.

    Everything is tried, not guessed; what cannot be seen from here is called unknown. Nothing is
    left behind on the drives.
    """
    from megatrain.doctor.command import diagnose

    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    ctx.exit(0 if diagnose(drives or (Path(),), burn=burn, as_json=as_json) else EXIT_FINDINGS)


def supervise(start: Callable[[RunObserver, Stop], Outcome]) -> None:
    """Run with a progress bar; exit with 130 if the run was asked to stop before its end."""
    from megatrain.progress import Terminal
    from megatrain.trainer import Stop

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("tiering.bandwidth").setLevel(logging.INFO)  # what each drive can do
    terminal, stop = Terminal(), Stop()
    stop.leave = _leave
    try:
        with _stopping(stop, terminal):
            outcome = start(terminal, stop)
    finally:
        terminal.close()
    if not outcome.step:
        click.echo("stopped before the first step; run megatrain train again", err=True)
        sys.exit(130)
    click.echo(f"{outcome.store}: step {outcome.step} is committed; metrics in {outcome.out}")
    if not outcome.finished:
        click.echo(f"stopped on request; go on with: megatrain-ckpt resume {outcome.out}", err=True)
        sys.exit(130)


@contextmanager
def _stopping(stop: Stop, terminal: Terminal) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a request; the second one interrupts at once."""

    def ask(number: int, frame: object) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.request()
        click.echo(f"\n{terminal.stopping}", err=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(error: BaseException) -> None:
    """End the process of a run that has failed, although one of its threads does not end."""
    if isinstance(error, MegatrainError | OSError):
        click.echo(f"error: {error}", err=True)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code(error))


def main() -> None:
    """Run the command line."""
    interrupts.install()
    cli()
