"""The command ``megatrain-ckpt``: the tools of ``checkpoint``, and ``resume``, which trains."""

from __future__ import annotations

from pathlib import Path

import click

from megatrain import names

try:
    from checkpoint import interrupts
    from checkpoint.cli import FOLDER, cli
except ImportError as error:
    raise names.refuse(error) from error
from megatrain.cli import SETS, supervise


@cli.command()
@click.argument("place", metavar="RUN_DIR|STORE", type=FOLDER)
@SETS
@click.option(
    "--allow-changes",
    is_flag=True,
    help="Apply settings of --set that make it another run, from the next step on.",
)
@click.option(
    "--generation",
    type=int,
    help="Go back to this one, and drop the metrics of later steps; default: the newest whole one.",
)
def resume(place: Path, sets: tuple[str, ...], allow_changes: bool, generation: int | None) -> None:
    """Go on with a run from its last commit, with the same numbers as if it had never stopped."""
    from megatrain import run

    supervise(
        lambda observer, stop: run.resume(
            place, sets, observer, stop, allow_changes=allow_changes, generation=generation
        )
    )


def main() -> None:
    """Run the command line."""
    interrupts.install()
    cli()
