"""The commands of ``megatrain-ckpt``. Data goes to standard output, talk to standard error."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoint.interrupts import EXIT_INTERRUPTED
from checkpoint.sizes import format_size, parse_size
from tiering.errors import MegatrainError, StorageError, UsageError
from tiering.records import DEFAULT_CODEC

if TYPE_CHECKING:
    from checkpoint.plan import Plan
    from checkpoint.recode import Cut

EXIT_FINDINGS = 1
EXIT_STORAGE = 5

_LAYOUTS = ("fp32", "split", "split8")
_FORMATS = ("hf", "zarr", "dcp")
_TIERS = ("nvme", "zarr")


class ErrorGroup(click.Group):
    """Ends a command with one message and the error's exit code instead of a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the command line."""
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt as error:  # click exits with 1 then, as if damage was found
            click.echo(f"error: {message_of(error)}", err=True)
            raise click.exceptions.Exit(exit_code(error)) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # names of files need not be text
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly when nobody reads standard output any more
        except (MegatrainError, OSError, KeyboardInterrupt) as error:
            _fail(ctx, message_of(error), exit_code(error))


def exit_code(error: BaseException) -> int:
    """Return what a command that ends with ``error`` exits with."""
    if isinstance(error, MegatrainError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_STORAGE if isinstance(error, OSError) else 1


def message_of(error: BaseException) -> str:
    """Say what failed, in the words of the errors that are expected."""
    if isinstance(error, OSError) and isinstance(error.filename, str | os.PathLike):
        return str(StorageError("use", error.filename, errno=error.errno or 0))
    return str(error) or "interrupted"


def _fail(ctx: click.Context, message: str, code: int) -> None:
    click.echo(f"error: {message}", err=True)
    ctx.exit(code)


FOLDER = click.Path(path_type=Path)


def _path(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Expand a leading ~ where the shell did not."""
    if isinstance(value, tuple):
        return tuple(path.expanduser() for path in value)
    return value.expanduser()


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read 8GiB, 500MB or a plain number."""
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _only(option: str, value: str, built: str) -> None:
    if value != built:
        raise UsageError(f"{option} {value}: not in this version yet; it has {option} {built}")


_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_generation = click.option("--generation", type=int, help="Not the newest but this generation.")
_only_one = click.option("--generation", type=int, help="Not all generations but this one.")


@click.group(cls=ErrorGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="megatrain")
def cli() -> None:
    """Bring model weights into a store and out of it, and look after the store."""


@cli.command()
@click.argument("src", type=FOLDER, callback=_path)
@click.argument("store", type=FOLDER, callback=_path)
@click.option(
    "--drive",
    "drives",
    multiple=True,
    type=FOLDER,
    callback=_path,
    help="A folder on a drive to stripe over; repeat for each. Default: inside STORE.",
)
@click.option(
    "--layout",
    type=click.Choice(_LAYOUTS),
    default="fp32",
    show_default=True,
    help="Roles and data types of the state.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="What the device computes with; with float32 the weights are the masters.",
)
@click.option(
    "--tier",
    type=click.Choice(_TIERS),
    default="nvme",
    show_default=True,
    help="How the records lie: raw and overwritten in place, or encoded and replaced.",
)
@click.option("--codec", metavar="NAME", help=f"Of the zarr tier.  [default: {DEFAULT_CODEC}]")
@click.option(
    "--ram", metavar="SIZE", callback=_size, help="At most this much memory for pieces of tensors."
)
@click.option("--weights", metavar="FILE", help="The file or index to follow, if SRC has several.")
@click.option(
    "--tie",
    is_flag=True,
    help="Tie what the model ties even if its bytes differ; the head is dropped.",
)
@_json
def convert(
    src: Path,
    store: Path,
    drives: tuple[Path, ...],
    layout: str,
    dtype: str,
    tier: str,
    codec: str | None,
    ram: int | None,
    weights: str | None,
    tie: bool,
    as_json: bool,
) -> None:
    """Make STORE from the Hugging Face folder SRC, as generation 1."""
    _only("--layout", layout, "fp32")
    if codec is not None and tier != "zarr":
        raise UsageError(f"--codec {codec}: shards are encoded in the zarr tier; add --tier zarr")
    from checkpoint.convert import convert as run
    from checkpoint.schema import Layout

    with _said(), _progress("converting") as on_progress:
        schema = run(
            src,
            store,
            drives=drives,
            layout=Layout.FLOAT32 if dtype == "float32" else Layout.FP32,
            codec=(codec or DEFAULT_CODEC) if tier == "zarr" else None,
            ram=ram,
            weights=weights,
            tie=tie,
            on_plan=_tell,
            on_progress=on_progress,
        )
    if as_json:
        _print_json(
            {
                "store": str(store),
                "generation": 1,
                "parameters": schema.parameters,
                "ledger": asdict(schema.ledger),
            }
        )
    else:
        nbytes = sum(record.nbytes for record in schema.records())
        click.echo(
            f"{store}: generation 1, {schema.parameters:,} parameters in "
            f"{len(schema.units)} units, {format_size(nbytes)} when it trains"
        )


def _tell(plan: Plan) -> None:
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)


@cli.command()
@click.argument("store", type=FOLDER, callback=_path)
@click.argument("out", type=FOLDER, callback=_path)
@click.option(
    "--format",
    "target",
    type=click.Choice(_FORMATS),
    default="hf",
    show_default=True,
    help="What to write.",
)
@click.option(
    "--dtype",
    type=click.Choice(["source", "bfloat16", "float32"]),
    default="source",
    show_default=True,
    help="Data type of the parameters; source: as they came.",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    callback=_size,
    default="5GB",
    show_default=True,
    help="Split into files of at most this size.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is a model folder.")
@_generation
@_json
def export(
    store: Path,
    out: Path,
    target: str,
    dtype: str,
    max_shard_size: int,
    overwrite: bool,
    generation: int | None,
    as_json: bool,
) -> None:
    """Write the weights of STORE to the Hugging Face folder OUT."""
    _only("--format", target, "hf")
    from checkpoint.export import export_hf

    with _progress("exporting") as on_progress:
        exported = export_hf(
            store,
            out,
            dtype=dtype,
            max_shard_size=max_shard_size,
            generation=generation,
            overwrite=overwrite,
            on_progress=on_progress,
        )
    if as_json:
        _print_json(asdict(exported))
    else:
        from checkpoint.render import exported_report, show

        show(exported_report(exported, str(out)))


@cli.command()
@click.argument("store", type=FOLDER, callback=_path)
@_generation
@_json
def inspect(store: Path, generation: int | None, as_json: bool) -> None:
    """Show what STORE holds and where it came from."""
    from checkpoint.summary import summarize

    summary = summarize(store, generation=generation)
    if as_json:
        _print_json(asdict(summary))
    else:
        from checkpoint.render import show, summary_report

        show(summary_report(summary))


@cli.command()
@click.argument("store", type=FOLDER, callback=_path)
@click.option("--deep", is_flag=True, help="Read every byte and compare it with its checksum.")
@_only_one
@_json
@click.pass_context
def verify(
    ctx: click.Context, store: Path, deep: bool, generation: int | None, as_json: bool
) -> None:
    """Check that every generation of STORE is what was committed; exit code 1 if one is not."""
    from checkpoint.verify import verify as run

    with _progress("verifying") as on_progress:
        findings = run(store, deep=deep, generation=generation, on_progress=on_progress)
    if as_json:
        from checkpoint.render import findings_document

        _print_json(findings_document(findings))
    else:
        from checkpoint.render import findings_report, show

        show(findings_report(findings))
    ctx.exit(0 if findings.ok else EXIT_FINDINGS)


@cli.command()
@click.argument("store", type=FOLDER, callback=_path)
@click.option(
    "--drive",
    "drives",
    multiple=True,
    type=FOLDER,
    callback=_path,
    help="A folder on a drive to lie on from now on; repeat for each.",
)
@click.option("--tier", type=click.Choice(_TIERS), help="nvme: raw shards, zarr: encoded ones.")
@click.option("--codec", metavar="NAME", help=f"Of the zarr tier.  [default: {DEFAULT_CODEC}]")
@click.option("--shard-size", metavar="SIZE", callback=_size, help="Cut shards of about this size.")
@click.option(
    "--records",
    metavar="PATTERN",
    multiple=True,
    default=("*",),
    help="Encode or cut only records with such names; repeat for more.  [default: all]",
)
@_json
def shard(
    store: Path,
    drives: tuple[Path, ...],
    tier: str | None,
    codec: str | None,
    shard_size: int | None,
    records: tuple[str, ...],
    as_json: bool,
) -> None:
    """Move STORE to other drives, or encode or cut its shards in another way.

    Whatever happens meanwhile, the store is whole; run the command again to go on.
    """
    cut = _cut(tier, codec, shard_size, records)
    if not drives and cut is None:
        raise UsageError("nothing to do: give --drive, --tier or --shard-size")
    from checkpoint.shard import shard as run

    with _said():
        sharded = run(store, drives=drives, cut=cut, progress=_progress)
    from checkpoint.render import shard_document, sharded_report, show

    if as_json:
        _print_json({"store": str(store), **shard_document(sharded)})
    else:
        show(sharded_report(sharded, str(store)))


def _cut(
    tier: str | None, codec: str | None, shard_size: int | None, records: tuple[str, ...]
) -> Cut | None:
    if codec is not None and tier != "zarr":
        raise UsageError(f"--codec {codec}: shards are encoded in the zarr tier; add --tier zarr")
    if tier is None and shard_size is None:
        return None
    from checkpoint.recode import Cut

    codecs = {None: None, "nvme": "", "zarr": codec or DEFAULT_CODEC}
    return Cut(codec=codecs[tier], shard_nbytes=shard_size, records=records)


@cli.command()
@click.argument("store", type=FOLDER, callback=_path)
@click.option(
    "--drive",
    "drives",
    multiple=True,
    required=True,
    type=FOLDER,
    callback=_path,
    help="Where a drive of STORE is now: the folder with drive.json, or the one above it.",
)
@_json
def attach(store: Path, drives: tuple[Path, ...], as_json: bool) -> None:
    """Tell STORE where drives are that were moved, mounted elsewhere or copied, and are its own."""
    from tiering.attaching import attach_drives

    attached = attach_drives(store, drives)
    if as_json:
        lines = [{"drive": drive.number, "folder": str(drive.folder)} for drive in attached]
        _print_json({"store": str(store), "drives": lines})
    else:
        for drive in attached:
            click.echo(f"{store}: drive {drive.number} is at {drive.folder}")


@cli.command()
@click.argument("store", type=FOLDER, callback=_path)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Keep the last N generations that are whole.",
)
@click.option("--yes", is_flag=True, help="Do it; without this nothing is changed.")
@_json
def prune(store: Path, keep: int, yes: bool, as_json: bool) -> None:
    """Drop generations of STORE, damaged ones first, and the files that nobody needs then.

    One slot stays to be written to. What a process reads stays until it ends.
    """
    from checkpoint.retention import prune as run

    pruned = run(store, keep=keep, yes=yes)
    if as_json:
        _print_json(asdict(pruned))
    else:
        from checkpoint.render import pruned_report, show

        show(pruned_report(pruned))


class _Echo(logging.Handler):
    """Says what is logged on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        click.echo(record.getMessage(), err=True)


@contextmanager
def _said() -> Iterator[None]:
    """Say what the drives were measured to do and how much each of them takes."""
    logger, echo = logging.getLogger("tiering.bandwidth"), _Echo(logging.INFO)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(echo)
    try:
        yield
    finally:
        logger.removeHandler(echo)
        logger.setLevel(before)


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes, rate and time left on standard error, if that is a terminal."""
    from tqdm import tqdm

    with tqdm(desc=title, unit="B", unit_scale=True, leave=False, disable=None) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield on_progress


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=1))
