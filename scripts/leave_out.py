"""Break the order of what is made durable, in every single way, and see which test notices.

    PYTHONPATH=. nice python scripts/leave_out.py  # all of it, as a table in Markdown
    PYTHONPATH=. nice python scripts/leave_out.py drop_drive  # functions or files of this name
    PYTHONPATH=. nice python scripts/leave_out.py --list  # the changes alone

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
import ctypes
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.order_changes import FILES, ROOT, Change, all_changes, functions

COPIED = ("tiering", "checkpoint", "megatrain", "tests", "docs", "pyproject.toml")
LIMIT_S = 900
_PR_SET_PDEATHSIG = 1

TESTS = (  # in this order: what is short and strict comes first
    "tests/crash/test_tiering_order.py",
    "tests/crash/test_syncs_reach_the_kernel.py",
    "tests/crash/test_power_cut_recording.py",
    "tests/unit/test_metrics.py",
    "tests/conformance/test_zarr3_writes.py",
    "tests/unit/test_tiering_lock.py",
    "tests/crash/test_power_cut.py",
    "tests/unit/test_tiering_store.py",
    "tests/crash/test_tiering_retention.py",
    "tests/crash/test_tiering_move.py",
    "tests/crash/test_slot_model.py",
    "tests/unit/test_tiering_drives.py",
    "tests/unit/test_tiering_ownership.py",
    "tests/unit/test_recode.py",
    "tests/unit/test_checkpoint_prune.py",
    "tests/conformance/test_kvikio.py",
    "tests/unit/test_places_of_a_run.py",
    "tests/crash/test_checkpoint_interrupted.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="functions or files; default: all")
    parser.add_argument("--list", action="store_true", help="print the changes, run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds for each change")
    parser.add_argument(
        "--learned", type=Path, help="keep here which tests run what; remove it when they change"
    )
    arguments = parser.parse_args()
    known = list(all_changes())
    require_one_change_for_each_reason(known)
    changes = [c for c in known if c.is_one_of(arguments.names)]
    if arguments.list:
        for change in changes:
            print(f"{change.where}: {change.text}")
        print(len(changes))
        return
    sys.exit(Trials(changes, arguments.jobs, arguments.limit).run(arguments.learned))


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
    limit_s: int
    covered: Mapping[str, Any] = field(default_factory=dict)
    kills: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    unexplained: int = 0
    noticed: int = 0

    def run(self, learned: Path | None = None) -> int:
        with tempfile.TemporaryDirectory() as folder:
            places = [make_copy(Path(folder) / str(n)) for n in range(self.jobs)]
            warm()
            if learned is None or not learned.exists():
                self.covered = learn(places[0])
            else:
                self.covered = json.loads(learned.read_text())
            if learned is not None:
                learned.write_text(json.dumps(self.covered))
            print("| where | change | what notices it |\n|---|---|---|", flush=True)
            waiting, idle = list(self.changes)[::-1], list(places)
            while waiting or len(idle) < len(places):
                while waiting and idle:
                    self.begin(idle.pop(), waiting.pop())
                working = [place for place in places if place not in idle]
                for place in finished(working, self.limit_s):
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
        """Return the tests that run a function, those that noticed most and fastest first.

        What the processes that a test starts may run comes last.
        """
        key = f"{change.file}:{change.function}"
        kills = self.kills
        found = [t for t, about in self.covered.items() if key in about["ran"] or about["forked"]]

        def order(test: str) -> tuple[float, ...]:
            file = test.partition("::")[0]
            noticed = (-kills[key, test], -kills[change.file, test])
            about = self.covered[test]
            return (*noticed, key not in about["ran"], TESTS.index(file), about["took"])

        return sorted(found, key=order)

    def end(self, place: Place) -> None:
        change, took = place.change, time.monotonic() - place.begin
        assert change is not None
        shutil.copyfile(ROOT / change.file, place.folder / change.file)
        lines = [json.loads(line) for line in place.output.splitlines()]
        failed = next((line for line in lines if "failed" in line), None)
        if failed:
            for part in (change.file, f"{change.file}:{change.function}"):
                self.kills[part, failed["failed"]] += 1
            verdict = f"{failed['failed'].partition('/')[2]}: {failed['error']}"
        elif took < LIMIT_S and (took > self.limit_s or lines[-1:] == [{"ended": True}]):
            verdict = f"**{reason(change)}**"
        else:
            verdict = "hangs or dies in " + str([x["test"] for x in lines if "test" in x][-1:])
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
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the copy has its own
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
        sys.addaudithook(self._audit)

    def _fork(self) -> None:
        self.forked = True

    def _audit(self, event: str, arguments: Sequence[Any]) -> None:
        if event == "subprocess.Popen":  # not mount and the like: they run nothing of ours
            self.forked |= Path(os.fsdecode(arguments[0])).name.startswith("python")

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
    while not finished([place], LIMIT_S):
        pass
    for file in FILES:
        shutil.copyfile(ROOT / file, place.folder / file)
    lines = [json.loads(line) for line in place.output.splitlines()]
    if failed := [line["failed"] for line in lines if "failed" in line]:
        sys.exit(f"failed without any change: {failed}")
    learned = {line["test"]: line for line in lines if "ran" in line}
    if not learned:
        sys.exit("no test was run")
    return learned


def finished(places: Sequence[Place], limit_s: float) -> list[Place]:
    """Wait until some processes have something to say; return those that have ended."""
    ready, _, _ = select.select([place.pipe for place in places], [], [], 5.0)
    ended = []
    for place in places:
        more = os.read(place.pipe, 1 << 16) if place.pipe in ready else b"-"
        place.output += more if place.pipe in ready else b""
        if not more or time.monotonic() - place.begin > limit_s:
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

_LOCAL = "the calls do not depend on each other, and nothing durable lies between them"
_TOGETHER = "one sync makes both durable before anything names them"
_WHOLE = "a slot is whole by its last file; what comes before that is made durable by one sync"

# by the function and the beginning of the change
REASONS: Mapping[tuple[str, str], str] = {
    ("make_dirs", "`for folder in missing"): "all of it is durable on return, nothing is in it yet",
    ("sync_drive", "`os.fdatasync"): "matters where a syncfs with an empty log flushes no cache",
    ("StoreWriter.resume", "`fsops.unlink(self.path / MARKER"): _LOCAL,
    (
        "StoreWriter.resume",
        "`self._slots.find()`",
    ): "only which damaged slot is warned of depends on it",
    (
        "StoreWriter.fit_slots",
        "`self.ensure_slots",
    ): "the slots are the same; the one first needs less room",
    (
        "StoreWriter.recast",
        "`self.drop_free_slots",
    ): "the slots are the same; the one first waits for readers",
    (
        "StoreWriter.begin",
        "`if self._reserving",
    ): "both come before the first byte is written to the slot",
    ("StoreWriter._publish", "`self._take_root"): _LOCAL,
    ("create_slot", "`for shard, number"): _WHOLE,
    ("create_slot", "`fsops.create_file(array"): _WHOLE,
    ("create_slot", "`fsops.symlink"): _WHOLE,
    ("settle_slot", "`fsops.fsync_dir"): "both are durable on return",
    ("_created", "`for drive in plan"): _TOGETHER,
    ("_created", "`schema = write_schema_files"): _TOGETHER,
    ("_write_marker", "`fsops.fsync_dir(store.parent)"): "both are durable on return",
    ("_dismantle", "`for name in _PARTS"): "the marker names both, and goes last",
    ("write_schema_files", "`fsops.create_file(_index_path"): _TOGETHER,
    ("_Mover.clear_remains", "`for drive in unlisted"): _LOCAL,
    ("_Mover.clear_remains", "`fsops.unlink(self._store / NEW_LINK"): _LOCAL,
    (
        "_Mover.clear_remains",
        "without `fsops.unlink(self._store",
    ): "the next link removes it too",
    ("Copier._copy_data", "`if writing"): "the copy only waits earlier",
    (
        "Copier._copy_data",
        "without `writing.exception()",
    ): "closing the drive waits too, and comes first",
    ("RecordFiles.write_all", "`if record.codec"): "an encoded record has no unaligned tail",
    ("_Request._end", "without `self._finish()"): "no transfer ends then, and no test",
    (
        "KvikioBackend._settle",
        "`self._try_without_device",
    ): "what failed is tried twice, with the same end",
    ("MetricsLog.sync", "`fsops.fsync_dir(self.path.parent)"): "both are durable on return",
    ("write_folder", "`for name, data in side_files"): _TOGETHER,
    ("write_folder", "`if len(shards) > 1"): _TOGETHER,
}


def reason(change: Change) -> str:
    """Return why a change may be made, or NOTHING."""
    for (function, beginning), text in REASONS.items():
        if change.function == function and change.text.startswith(beginning):
            return text
    return "NOTHING"


def require_one_change_for_each_reason(changes: Sequence[Change]) -> None:
    """Exit if a reason excuses nothing any more, or more than what it was written for."""
    for function, beginning in REASONS:
        found = [c for c in changes if c.function == function and c.text.startswith(beginning)]
        if len(found) != 1:
            sys.exit(f"the reason for {function}, {beginning}, is one for {len(found)} changes")


if __name__ == "__main__":
    main()
