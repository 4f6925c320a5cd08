"""Whatever call of a command fails, and however: it says so, and nothing is lost.

Here each kind of fault is met at a few of its calls; ``scripts/fault_table.py`` tries them all.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.children import Children
from tests.support.fault_trials import KINDS, FaultKind, Verdict, attempt
from tests.support.faults import Fault
from tests.support.programs import (
    Convert,
    ConvertEncoded,
    Encode,
    Export,
    ExportOver,
    Move,
    Program,
    Resume,
    Train,
)

Made = Callable[[type[Program]], Program]

QUICK = (Convert, Move, ConvertEncoded, Encode, Export, ExportOver)
RUNS = {
    Train: ("write EIO",),
    Resume: ("write ENOSPC from then on", "read EIO", "sync EIO", "reserve ENOSPC", "rename EIO"),
}


def failing() -> Iterator[tuple[type[Program], FaultKind]]:
    """Yield every kind of failure with a quick command that makes such calls; some with runs."""
    kinds = [kind for kind in KINDS if not kind.passes]
    for number, kind in enumerate(kinds):
        yield (Move if kind.op == "reserve" else QUICK[number % len(QUICK)]), kind
    for program, names in RUNS.items():
        yield from ((program, kind) for kind in kinds if kind.name in names)


@pytest.mark.parametrize(("kind_of_program", "kind"), failing(), ids=lambda v: v.name)
def test_a_failed_call_is_told_and_nothing_is_lost(
    program: Made, children: Children, kind_of_program: type[Program], kind: FaultKind
) -> None:
    victim = program(kind_of_program)
    numbers = kind.numbers(victim.calls[kind.op])
    if not numbers:
        pytest.skip(f"{victim.name} makes no such call")
    number = numbers[zlib.crc32(kind.name.encode()) % len(numbers)]
    trial = attempt(victim, children, kind, number)
    assert trial.verdict.allowed, str(trial)


@pytest.mark.parametrize("kind_of_program", [Convert, Export, ExportOver], ids=lambda v: v.name)
def test_what_may_not_outlive_a_power_cut_is_taken_back(
    program: Made, children: Children, kind_of_program: type[Program]
) -> None:
    victim = program(kind_of_program)
    kind = next(kind for kind in KINDS if kind.name == "sync EIO")
    trial = attempt(victim, children, kind, victim.calls["sync"] - 1)
    assert trial.verdict is Verdict.CLEAN, str(trial)


@pytest.mark.parametrize("kind_of_program", [*QUICK, Train, Resume], ids=lambda v: v.name)
def test_interrupted_short_and_slow_calls_change_nothing(
    program: Made, children: Children, kind_of_program: type[Program]
) -> None:
    victim = program(kind_of_program)
    victim.reset()
    kinds = [kind for kind in KINDS if kind.passes]
    ended = children.run(victim.command, *(k.at(0, f"{victim.site.base}/") for k in kinds))
    assert (ended.code, ended.err if ended.code else "") == (0, "")
    assert victim.differs() == ""
    missed = {k.name for k, hits in zip(kinds, ended.hits, strict=True) if not hits}
    assert all(victim.calls[name.split()[0]] == 0 for name in missed), missed


@pytest.mark.parametrize("op", ["read", "write", "open", "create", "sync", "reserve"])
def test_the_interpreter_makes_an_interrupted_call_again(
    children: Children, tmp_path: Path, op: str
) -> None:
    fault = Fault(op=op, path=f"{tmp_path}/", count=3, errno=errno.EINTR)
    ended = children.run(["tests.crash.test_faults:calls", tmp_path / "file"], fault)
    assert (ended.code, ended.err) == (0, "")
    assert (ended.hits, ended.seen) == ((3,), (4,))


def calls(path: str) -> None:
    """Make one call of each sort."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 1)
    assert os.pwrite(fd, b"a", 0) == 1
    os.fdatasync(fd)
    os.close(os.open(path, os.O_RDWR))
    assert os.pread(fd, 1, 0) == b"a"


def test_a_fault_that_is_over_is_found_by_the_call_that_it_hit(
    children: Children, tmp_path: Path
) -> None:
    fault = Fault(op="write", path=f"{tmp_path}/", errno=errno.EIO)
    ended = children.run(["tests.crash.test_faults:calls", tmp_path / "file"], fault)
    assert ended.code == 1
    assert "Input/output error" in ended.err


def test_a_command_that_hangs_is_ended_and_says_where(children: Children) -> None:
    ended = children.run(["tests.crash.test_faults:wait"], timeout_s=1.2)
    assert ended.hung
    assert "test_faults.py" in ended.err


def wait() -> None:
    threading.Event().wait()
