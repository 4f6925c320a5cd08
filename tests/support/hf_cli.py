"""The commands as a user runs them, in this process."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from checkpoint.cli import cli
from tests.support.hf_folders import Tensors, assert_same, load_folder


def run(*arguments: object, code: int = 0) -> Result:
    """Run a command that ends with ``code``; an unexpected exception is raised here."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def refuse(folder: Path, *options: object, code: int = 3) -> str:
    """Run a conversion that must be refused without a trace, and return its message."""
    store = folder.parent / "refused store"
    result = run("convert", folder, store, *options, code=code)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") or code == 2
    assert len(result.stderr.splitlines()) <= 4
    assert not store.exists()
    for command in ("inspect", "verify"):
        run(command, store, code=3)
    return result.stderr


def round_trip(folder: Path, wanted: Tensors, *options: object) -> str:
    """Convert and export, compare every tensor with ``wanted``, and return what was said."""
    store, out = folder.parent / "store", folder.parent / "out"
    result = run("convert", folder, store, *options)
    run("verify", "--deep", store)
    run("export", store, out)
    assert_same(load_folder(out), wanted)
    return result.stderr
