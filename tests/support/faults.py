"""Faults below the interpreter: transfers that fail or end early, in a process of their own."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tiering.errors import StorageError
from tiering.records import ALIGNMENT
from tiering.testing import BackendConformance, aligned_buffer, wait_for

_SOURCE = Path(__file__).with_name("iofault.c")

CALLS = (
    "read",
    "write",
    "sync",
    "reserve",
    "truncate",
    "open",
    "create",
    "list",
    "mkdir",
    "unlink",
    "rename",
    "link",
)


HALF = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Calls ``after`` to ``after + count`` of ``op`` on files whose path has ``path`` in it.

    Attributes:
        op: One of :data:`CALLS`.
        every: Only each so many of them, from the first on.
        errno: The calls fail with it; if it is 0, they move only ``moves`` bytes.
        moves: Bytes; HALF: of what was asked for.
        delay_ms: The calls wait, and then do what they should; instead of failing.
        held: The calls wait until somebody lets them go; then they do what they should, or fail.
        kill: The process is killed: just ``before`` the call, or with it ``torn`` in the middle.
    """

    op: str
    path: str
    after: int = 0
    count: int = 1 << 30
    every: int = 1
    errno: int = 0
    moves: int = 0
    delay_ms: int = 0
    held: bool = False
    kill: str = ""

    def __str__(self) -> str:
        return f"{self.op}:{self.path}:{self.after}:{self.count}:{self.every}:{self._what()}"

    def _what(self) -> str:
        if self.kill:
            return {"before": "k0", "torn": "t0"}[self.kill]
        if self.held:
            return f"h{self.errno}"
        if self.delay_ms:
            return f"d{self.delay_ms}"
        return f"e{self.errno}" if self.errno else f"m{self.moves}"


def build_shim(folder: Path) -> Path:
    """Return the library that makes faults happen, compiled into ``folder``."""
    library = folder / "iofault.so"
    if not library.exists():
        command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no gcc here")
        except subprocess.CalledProcessError as error:
            raise RuntimeError(error.stderr) from error
    return library


def as_text(faults: Sequence[Fault]) -> str:
    return ";".join(str(fault) for fault in faults)


def faulty_environment(shim: Path, faults: Sequence[Fault]) -> Mapping[str, str]:
    """Return the environment of a Python process in which ``faults`` happen."""
    return {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "IOFAULT": as_text(faults),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def run_with_faults(
    arguments: Sequence[str], *, shim: Path, faults: Sequence[Fault]
) -> subprocess.CompletedProcess[str]:
    """Run Python with ``arguments`` while ``faults`` happen to it, and return how it ended."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=faulty_environment(shim, faults),
        capture_output=True,
        text=True,
        timeout=300,
    )


class Other:
    """Another process in which a suite's backend moves bytes while faults happen to it."""

    def __init__(self, file: str, suite: str, shim: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faults", file, suite],
            env=faulty_environment(shim, ()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def transfer(
        self, path: Path, op: str, offset: int, nbytes: int, *faults: Fault
    ) -> Mapping[str, Any]:
        """Move bytes of ``path``; return what came of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"path": str(path), "op": op, "offset": offset, "nbytes": nbytes}
        print(
            json.dumps({**request, "faults": as_text(faults)}), file=self._process.stdin, flush=True
        )
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        outcome: Mapping[str, Any] = json.loads(line)
        return outcome

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


class FaultConformance(BackendConformance):
    """The suite, and what a backend does about transfers that fail or end early.

    ``make_backend`` is also called on an instance of its own in another process.
    """

    @pytest.fixture(name="other", scope="class")
    def _other(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Other]:
        shim = build_shim(tmp_path_factory.mktemp("shim"))
        with Other(inspect.getfile(type(self)), type(self).__qualname__, shim) as other:
            yield other

    @pytest.mark.parametrize("moves", [4096, 5000])
    def test_short_writes_go_on_where_they_ended(
        self, folder: Path, other: Other, moves: int
    ) -> None:
        nbytes = 6 * ALIGNMENT
        path = self.make_file(folder, bytes(nbytes), "victim")
        fault = Fault(op="write", path="victim", count=3, moves=moves)
        outcome = other.transfer(path, "write", 0, nbytes, fault)
        assert outcome == {"moved": nbytes, "complete": True}
        assert self.content(path) == aligned_buffer(nbytes, seed=1)

    @pytest.mark.parametrize("moves", [4096, 5000])
    def test_short_reads_go_on_where_they_ended(
        self, folder: Path, other: Other, moves: int
    ) -> None:
        nbytes = 6 * ALIGNMENT
        path = self.make_file(folder, aligned_buffer(nbytes, seed=1), "victim")
        fault = Fault(op="read", path="victim", count=3, moves=moves)
        outcome = other.transfer(path, "read", 0, nbytes, fault)
        assert outcome == {"moved": nbytes, "complete": True}

    @pytest.mark.parametrize(
        ("op", "code"), [("write", errno.ENOSPC), ("write", errno.EIO), ("read", errno.EIO)]
    )
    def test_an_error_after_a_short_transfer_tells_how_far_it_came(
        self, folder: Path, other: Other, op: str, code: int
    ) -> None:
        path = self.make_file(folder, bytes(9 * ALIGNMENT), "victim")
        short = Fault(op=op, path="victim", count=1, moves=2 * ALIGNMENT)
        failed = Fault(op=op, path="victim", after=1, errno=code)
        outcome = other.transfer(path, op, ALIGNMENT, 8 * ALIGNMENT, short, failed)
        assert outcome == {
            "errno": code,
            "path": str(path),
            "offset": 3 * ALIGNMENT,
            "wanted": 8 * ALIGNMENT,
            "moved": 2 * ALIGNMENT,
        }

    @pytest.mark.parametrize("op", ["read", "write"])
    def test_transfers_that_move_nothing_end_with_an_error(
        self, folder: Path, other: Other, op: str
    ) -> None:
        path = self.make_file(folder, bytes(4 * ALIGNMENT), "victim")
        fault = Fault(op=op, path="victim", moves=0)
        outcome = other.transfer(path, op, 0, 4 * ALIGNMENT, fault)
        assert (outcome["path"], outcome["moved"]) == (str(path), 0)

    @pytest.mark.parametrize("op", ["read", "write"])
    def test_an_interrupted_call_is_made_again(self, folder: Path, other: Other, op: str) -> None:
        path = self.make_file(folder, aligned_buffer(4 * ALIGNMENT, seed=1), "victim")
        fault = Fault(op=op, path="victim", count=5, errno=errno.EINTR)
        outcome = other.transfer(path, op, 0, 4 * ALIGNMENT, fault)
        assert outcome["moved"] == 4 * ALIGNMENT
        assert self.content(path) == aligned_buffer(4 * ALIGNMENT, seed=1)


def _suite(file: str, name: str) -> FaultConformance:
    spec = importlib.util.spec_from_file_location("suite", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["suite"] = module
    spec.loader.exec_module(module)
    suite: FaultConformance = getattr(module, name)()
    return suite


def _serve(suite: FaultConformance) -> None:
    """Answer requests to move random bytes of seed 1 to a file, or to find them there."""
    shim = ctypes.CDLL(None)
    for line in sys.stdin:
        request = json.loads(line)
        arm = partial(shim.iofault_set, request.pop("faults").encode())
        print(json.dumps(_transfer(suite, arm, **request)), flush=True)
        shim.iofault_set(b"")


def _transfer(
    suite: FaultConformance,
    arm: Callable[[], object],
    *,
    path: str,
    op: str,
    offset: int,
    nbytes: int,
) -> dict[str, Any]:
    data = aligned_buffer(nbytes, seed=1)
    buffer = data if op == "write" else aligned_buffer(nbytes)
    backend = suite.make_backend(Path(path).parent)
    arm()
    submit = backend.write if op == "write" else backend.read
    try:
        moved = wait_for(submit(Path(path), offset, buffer))
        return {"moved": moved, "complete": buffer == data}
    except StorageError as error:
        names = ("errno", "offset", "wanted", "moved")
        return {"path": str(error.path), **{key: getattr(error, key) for key in names}}
    finally:
        backend.close()


if __name__ == "__main__":
    _serve(_suite(*sys.argv[1:]))
