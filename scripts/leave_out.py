"""Break the order of what is made durable, in every single way, and see which test notices.

    nice python scripts/leave_out.py                    # all of it, as a table in Markdown
    nice python scripts/leave_out.py drop_drive         # functions or files of this name
    nice python scripts/leave_out.py --list             # the changes alone

In a copy of the tree each call that makes something durable, or that comes in order with such
calls, is left out, and each two that follow each other are exchanged, one change at a time. Then
the tests that run the changed function are run until one fails. What no test notices is listed
with the reason why it need not be; without a reason it is an error.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import collections
import copy
import ctypes
import itertools
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("tiering", "checkpoint", "megatrain", "tests", "docs", "pyproject.toml")
LIMIT_S = 900
_PR_SET_PDEATHSIG = 1

FILES = (
    "tiering/fsops.py",
    "tiering/generations.py",
    "tiering/writer.py",
    "tiering/resumption.py",
    "tiering/slots.py",
    "tiering/slot_table.py",
    "tiering/creation.py",
    "tiering/schema_files.py",
    "tiering/drives.py",
    "tiering/attaching.py",
    "tiering/moving.py",
    "tiering/copying.py",
    "tiering/space.py",
    "tiering/lock.py",
    "tiering/reader.py",
    "tiering/recordio.py",
    "tiering/backends/posix.py",
    "tiering/backends/kvikio.py",
    "tiering/backends/zarr3.py",
    "checkpoint/recode.py",
    "checkpoint/retention.py",
    "checkpoint/convert.py",
    "checkpoint/formats/hf_writer.py",
    "megatrain/metrics.py",
    "megatrain/stores.py",
)

TESTS = (
    "tests/crash/test_power_cut.py",
    "tests/crash/test_power_cut_recording.py",
    "tests/crash/test_tiering_order.py",
    "tests/unit/test_tiering_lock.py",
    "tests/unit/test_tiering_store.py",
    "tests/crash/test_tiering_retention.py",
    "tests/crash/test_tiering_move.py",
    "tests/unit/test_metrics.py",
    "tests/crash/test_slot_model.py",
)

# -- what is a step --------------------------------------------------------------------------------

SYNCS = {"fsync_file", "fsync_open", "fsync_dir", "sync_drive", "fsync", "fdatasync", "syncfs"}
NAMES = {"replace", "exchange", "symlink", "unlink", "remove_dir", "remove_tree", "finish"}
BYTES = {"write_file", "create_file", "create_sparse", "make_dir", "truncate", "reserve"}
WAITS = {"result", "exception", "ended"}
LOCKS = {  # what stands for a lock that is not taken
    "StoreLock": "__import__('io').BytesIO()",
    "claim": "__import__('os').open({0}, 0)",
    "hold": "__import__('os').open({0}, 0)",
    "is_held": "False",
    "_acquire": "True",
    "_flock": "True",
}
STEPS = SYNCS | NAMES | BYTES | {"rewrite_in_place", "begin_write"}
RECEIVERS = re.compile(
    r"(fsops|lock|space|os|libc|self|self\._slots|self\._file|self\._files|self\._plain|writer|mover"
    r"|copier|self\._writer|\w*\.?_?backends\[.*\]|recordio)$"
)
OF_SYNCS = {"_sync_drives", "_sync_all", "_finish", "settle_slot", "settle_removal", "close"}
LEFT_OUT = SYNCS | OF_SYNCS | (NAMES - {"symlink"}) | WAITS | {"write_file", "reap"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="functions or files; default: all")
    parser.add_argument("--list", action="store_true", help="print the changes, run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    arguments = parser.parse_args()
    changes = [c for c in all_changes() if c.is_one_of(arguments.names)]
    if arguments.list:
        for change in changes:
            print(f"{change.where}: {change.text}")
        print(len(changes))
        return
    sys.exit(Trials(changes, arguments.jobs).run())


# -- changes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A file with one change in one function, and what it is in words."""

    file: str
    function: str
    line: int
    text: str
    source: str

    @property
    def where(self) -> str:
        return f"{self.file} {self.function}"

    def is_one_of(self, names: Sequence[str]) -> bool:
        return not names or any(
            name == self.file or re.search(rf"(^|\.)_?{re.escape(name)}$", self.function)
            for name in names
        )


def all_changes() -> Iterator[Change]:
    trees = {file: ast.parse((ROOT / file).read_text()) for file in FILES}
    steps = durable_functions(trees.values())
    for file, tree in trees.items():
        for name, function in functions(tree):
            yield from changes_of(file, tree, name, function, steps)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def durable_functions(trees: Iterable[ast.AST]) -> set[str]:
    """Return the names of all functions that take a step, by others or themselves."""
    calls: dict[str, set[str]] = {}
    for tree in trees:
        for name, function in functions(tree):
            calls.setdefault(name.rpartition(".")[2], set()).update(called(function))
    found = STEPS | set(LOCKS)
    while more := {name for name, inner in calls.items() if inner & found} - found:
        found |= more
    return found


def called(node: ast.AST) -> Iterator[str]:
    """Yield the names of the functions of the product that a piece of code calls."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and (name := callee(inner)):
            yield name


def callee(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Name):  # replace with keywords is that of dataclasses
        return None if call.func.id == "replace" and call.keywords else call.func.id
    if isinstance(call.func, ast.Attribute) and (
        call.func.attr in WAITS or RECEIVERS.match(ast.unparse(call.func.value))
    ):
        return call.func.attr
    return None


def changes_of(
    file: str, tree: ast.Module, name: str, function: ast.FunctionDef, steps: set[str]
) -> Iterator[Change]:
    def change(node: ast.stmt, text: str) -> Change:
        source = ast.unparse(ast.fix_missing_locations(tree))
        return Change(file=file, function=name, line=node.lineno, text=text, source=source)

    for block in blocks(function):
        for number, statement in enumerate(block):
            for call in left_out(statement):
                block[number] = copy.deepcopy(statement)
                text = leave_out(block, number, call)
                yield change(statement, text)
                block[number] = statement
        for one, other in neighbours(block, steps):
            text = f"`{short(block[other])}` before `{short(block[one])}`"
            block[one], block[other] = block[other], block[one]
            yield change(block[other], text)
            block[one], block[other] = block[other], block[one]
    for node in ast.walk(function):
        if isinstance(node, ast.With):
            for at in range(len(node.items) - 1):
                if all(set(called(item)) & steps for item in node.items[at : at + 2]):
                    node.items[at : at + 2] = node.items[at : at + 2][::-1]
                    pair = [ast.unparse(item) for item in node.items[at : at + 2]]
                    yield change(node, f"with `{pair[0]}` before `{pair[1]}`")
                    node.items[at : at + 2] = node.items[at : at + 2][::-1]


def blocks(node: ast.AST) -> list[list[ast.stmt]]:
    found = []
    for inner in ast.walk(node):
        for part in ("body", "orelse", "finalbody"):
            block = getattr(inner, part, None)
            if isinstance(block, list) and block:
                found.append(block)
    return found


def own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls of a statement that are not in a block of its own."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.ExceptHandler):
                waiting.append(child)


def left_out(statement: ast.stmt) -> list[int]:
    """Return which of the calls of a statement can be left out, by their place among all."""
    return [
        number
        for number, call in enumerate(own_calls(statement))
        if (name := callee(call)) in LEFT_OUT | set(LOCKS)
        and (isinstance(statement, ast.Expr) or name in {*LOCKS, "syncfs", "result", "exchange"})
        and not (name == "result" and "piece" in ast.unparse(call))
        and not (name == "close" and "self._file." not in ast.unparse(call))
    ]


def leave_out(block: list[ast.stmt], number: int, place: int) -> str:
    """Leave one call out and say so."""
    statement = block[number]
    call = list(own_calls(statement))[place]
    text, name = short(call), callee(call)
    if name == "write_file" and isinstance(call.func, ast.Attribute):
        call.func.attr = "create_file"
        return f"`{text}` without its fsync"
    if name in LOCKS:
        arguments = [ast.unparse(argument) for argument in call.args]
        substitute(statement, call, LOCKS[name].format(*arguments, ""))
    elif name in ("syncfs", "exchange"):
        substitute(statement, call, "0" if name == "syncfs" else "False")
    elif name == "result" and not (isinstance(statement, ast.Expr) and statement.value is call):
        substitute(statement, call, "0")
    else:
        block[number] = ast.copy_location(ast.Pass(), statement)
    return f"without `{text}`"


def substitute(statement: ast.stmt, call: ast.Call, text: str) -> None:
    replacement = ast.parse(text, mode="eval").body
    for node in ast.walk(statement):
        for part, value in ast.iter_fields(node):
            if value is call:
                setattr(node, part, replacement)
            elif isinstance(value, list) and call in value:
                value[value.index(call)] = replacement


def neighbours(block: list[ast.stmt], steps: set[str]) -> Iterator[tuple[int, int]]:
    """Yield which statements of a block take steps that follow each other and can be exchanged."""
    places = [n for n, statement in enumerate(block) if takes_steps(statement, steps)]
    for one, other in itertools.pairwise(places):
        between = block[one + 1 : other]
        runs = not (
            bound([block[one], *between]) & used([block[other]])
            or bound([block[one]]) & used(between)
            or bound(between) & used([block[one]])
            or bound([block[other]]) & used([block[one], *between])
        )
        if runs and ast.dump(block[one]) != ast.dump(block[other]):
            yield one, other


def takes_steps(statement: ast.stmt, steps: set[str]) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.Return | ast.Raise):
        return False
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(statement))
    return yields or bool(set(called(statement)) & (steps | WAITS))


def bound(statements: Sequence[ast.stmt]) -> set[str]:
    return names(statements, ast.Store)


def used(statements: Sequence[ast.stmt]) -> set[str]:
    return names(statements, ast.Load)


def names(statements: Sequence[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    found = (node for statement in statements for node in ast.walk(statement))
    return {n.id for n in found if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return (text.splitlines()[0] + (" ..." if "\n" in text else ""))[:90]


# -- trials ----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Place:
    """A copy of the tree, and the process that works in it."""

    folder: Path
    change: Change | None = None
    pid: int = 0
    pipe: int = -1
    begin: float = 0.0
    output: bytes = b""


@dataclass(slots=True)
class Trials:
    """Runs the tests on every change, in copies of the tree."""

    changes: Sequence[Change]
    jobs: int
    covered: Mapping[str, Any] = field(default_factory=dict)
    kills: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    unexplained: int = 0
    noticed: int = 0

    def run(self) -> int:
        with tempfile.TemporaryDirectory() as folder:
            places = [make_copy(Path(folder) / str(n)) for n in range(self.jobs)]
            warm()
            self.covered = learn(places[0])
            print("| where | change | what notices it |\n|---|---|---|", flush=True)
            waiting, idle = list(self.changes)[::-1], list(places)
            while waiting or len(idle) < len(places):
                while waiting and idle:
                    self.begin(idle.pop(), waiting.pop())
                working = [place for place in places if place not in idle]
                for place in finished(working):
                    self.end(place)
                    idle.append(place)
        print(f"\n{len(self.changes)} changes, {self.noticed} noticed, ", end="")
        print(f"{self.unexplained} neither noticed nor explained")
        return 1 if self.unexplained else 0

    def begin(self, place: Place, change: Change) -> None:
        place.change, place.begin, place.output = change, time.monotonic(), b""
        (place.folder / change.file).write_text(change.source)
        shutil.rmtree(place.folder / Path(change.file).parent / "__pycache__", ignore_errors=True)
        start(place, self.tests_of(change), "fail")

    def tests_of(self, change: Change) -> list[str]:
        """Return the tests that run a function, those that noticed most and fastest first."""
        key = f"{change.file}:{change.function}"
        found = [t for t, about in self.covered.items() if key in about["ran"] or about["forked"]]

        def order(test: str) -> tuple[float, ...]:
            file = test.partition("::")[0]
            return (-self.kills[change.file, test], TESTS.index(file), self.covered[test]["took"])

        return sorted(found, key=order)

    def end(self, place: Place) -> None:
        change, took = place.change, time.monotonic() - place.begin
        assert change is not None
        shutil.copyfile(ROOT / change.file, place.folder / change.file)
        lines = [json.loads(line) for line in place.output.splitlines()]
        failed = next((line for line in lines if "failed" in line), None)
        if failed:
            self.kills[change.file, failed["failed"]] += 1
            verdict = f"{failed['failed'].partition('/')[2]}: {failed['error']}"
        elif took > LIMIT_S or not any("ended" in line for line in lines):
            verdict = "hangs or dies in " + str([x["test"] for x in lines if "test" in x][-1:])
        else:
            verdict = f"**{reason(change)}**"
        self.noticed += not verdict.startswith("**")
        self.unexplained += verdict == "**NOTHING**"
        print(f"| {change.where} | {change.text} | {verdict.replace('|', '/')} |", flush=True)
        print(f"{took:.0f} s, {len(lines)} tests", file=sys.stderr, flush=True)


def make_copy(folder: Path) -> Place:
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copyfile(source, folder / name)
    return Place(folder=folder)


def warm() -> None:
    """Import what all tests need, so that each child has it."""
    for package in ("numpy", "numcodecs", "psutil", "pytest", "zarr", "crc32c"):
        __import__(package)


def start(place: Place, tests: Sequence[str], mode: str) -> None:
    """Run tests in a child of its own in a copy; what it says comes out of the pipe."""
    sys.stdout.flush()
    place.pipe, out = os.pipe()
    place.pid = os.fork()
    if place.pid == 0:
        code = 1
        try:
            os.setsid()  # so that all that the tests start can be ended
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(place.pipe)
            child(place.folder, tests, mode, out)
            code = 0
        finally:
            os._exit(code)
    os.close(out)


def child(folder: Path, tests: Sequence[str], mode: str, out: int) -> None:
    import pytest

    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    here = {str(ROOT), str(ROOT / "scripts"), "", "."}
    sys.path[:] = [str(folder), *(p for p in sys.path if p not in here)]
    os.environ["PYTHONPATH"] = str(folder)
    reporter = Learner(out) if mode == "learn" else Reporter(out)
    more = ["-x"] if mode == "fail" else []
    pytest.main([*tests, *more, "-p", "no:cacheprovider", "-q"], plugins=[reporter])
    reporter.say(ended=True)


class Reporter:
    """Says which test is run, and which failed with what."""

    def __init__(self, out: int) -> None:
        self.out = out

    def say(self, **about: Any) -> None:
        os.write(self.out, json.dumps(about).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.say(test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.say(failed=report.nodeid, error=plain(crash.message if crash else ""))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.say(failed=report.nodeid, error="cannot be imported")


def telling(file: str) -> str:
    """Return a file whose functions say that they are run."""
    tree = ast.parse((ROOT / file).read_text())
    for name, function in functions(tree):
        told = "getattr(__import__('builtins'), 'ran_functions', set())"  # none in other programs
        says = ast.parse(f"{told}.add({f'{file}:{name}'!r})").body
        function.body[0:0] = says
    return ast.unparse(ast.fix_missing_locations(tree))


class Learner(Reporter):
    """Says which functions of the product each test runs, and how long that takes."""

    def __init__(self, out: int) -> None:
        super().__init__(out)
        self.ran: set[str] = set()
        self.forked = False
        self.begin = 0.0
        builtins.ran_functions = self.ran  # type: ignore[attr-defined]
        os.register_at_fork(before=self._fork)

    def _fork(self) -> None:
        self.forked = True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.ran, self.forked, self.begin = set(), False, time.process_time()
        builtins.ran_functions = self.ran  # type: ignore[attr-defined]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        took = time.process_time() - self.begin
        self.say(test=nodeid, ran=sorted(self.ran), took=took, forked=self.forked)


def learn(place: Place) -> Mapping[str, Any]:
    """Return of each test which functions it runs, whether it forks, and its seconds."""
    for file in FILES:
        (place.folder / file).write_text(telling(file))
    place.output, place.begin = b"", time.monotonic()
    start(place, TESTS, "learn")
    while not finished([place]):
        pass
    for file in FILES:
        shutil.copyfile(ROOT / file, place.folder / file)
    lines = [json.loads(line) for line in place.output.splitlines()]
    if failed := [line["failed"] for line in lines if "failed" in line]:
        sys.exit(f"failed without any change: {failed}")
    return {line["test"]: line for line in lines if "ran" in line}


def finished(places: Sequence[Place]) -> list[Place]:
    """Wait until some processes have something to say; return those that have ended."""
    ready, _, _ = select.select([place.pipe for place in places], [], [], 5.0)
    ended = []
    for place in places:
        more = os.read(place.pipe, 1 << 16) if place.pipe in ready else b"-"
        place.output += more if place.pipe in ready else b""
        if not more or time.monotonic() - place.begin > LIMIT_S:
            os.killpg(place.pid, signal.SIGKILL)
            os.waitpid(place.pid, 0)
            os.close(place.pipe)
            ended.append(place)
    return ended


def plain(message: str) -> str:
    text = re.sub(r"/\S*/(?=store)", "", " ".join(message.split()))
    text = text.removeprefix("tests.support.power_cut_images.Violation: ")
    return re.sub(r"[0-9a-f]{9,}|tmp\w{8}/?", "", text)[:160]


# -- what need not be noticed ----------------------------------------------------------------------

REASONS: Mapping[tuple[str, str], str] = {}


def reason(change: Change) -> str:
    """Return why a change may be made, or NOTHING."""
    return REASONS.get((change.function, change.text), "NOTHING")


if __name__ == "__main__":
    main()
