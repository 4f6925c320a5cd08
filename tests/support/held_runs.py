"""Commands in processes of their own, whose transfers fail or are held below the interpreter.

One process imports what a run needs, with the shim loaded, and forks for each command.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megatrain.optimizer import load_kernel
from tests.support.children import MODULES
from tests.support.faults import Fault, as_text, faulty_environment

GRACE_S = 0.3
PATIENCE_S = 60


@dataclass(slots=True, kw_only=True)
class Command:
    """A command that runs. ``said`` is what it wrote so far, to both of its outputs."""

    pid: int
    folder: Path
    _driver: Driver

    def wait_until_held(self, op: str) -> None:
        """Return when a call of that kind is held."""
        fd = os.open(self.folder / f"held.{op}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            ready, _, _ = select.select([fd], [], [], PATIENCE_S)
            assert ready, f"no {op} was held: {self.said}"
        finally:
            os.close(fd)

    def let_go(self, op: str) -> None:
        """Let the held call of that kind go on."""
        os.close(os.open(self.folder / f"go.{op}", os.O_WRONLY))

    def wait_for(self, text: str) -> None:
        """Return when the command has said ``text``."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.said:
            assert time.monotonic() < deadline, f"it never said {text!r}: {self.said}"
            assert self._driver.ask(peek=self.pid) is None, f"it ended: {self.said}"
            select.select([], [], [], 0.02)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def send_until_ended(self, number: signal.Signals) -> None:
        """Send a signal, and again, as somebody does who sees nothing happen."""
        for _ in range(20):
            self.send(number)
            select.select([], [], [], 0.1)
            if self._driver.ask(peek=self.pid) is not None:
                return

    def exit_code(self) -> int:
        """Return how it ended; minus a signal's number if that killed it."""
        code = self._driver.ask(wait=self.pid)
        assert code is not None, f"it does not end: {self.said}"
        return int(code)

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")


class Driver:
    """The process that forks commands."""

    def __init__(self, shim: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.held_runs"],
            env=faulty_environment(shim, ()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        """Return the answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def start(self, arguments: Sequence[str], folder: Path, *faults: Fault) -> Command:
        """Start ``megatrain-ckpt`` or ``megatrain`` with ``arguments``; ``folder`` is for talk."""
        folder.mkdir()
        for op in ("read", "write", "sync"):
            os.mkfifo(folder / f"held.{op}")
            os.mkfifo(folder / f"go.{op}")
        (folder / "said").touch()
        pid = self.ask(start=list(arguments), folder=str(folder), faults=as_text(faults))
        return Command(pid=pid, folder=folder, _driver=self)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def _serve(answers: TextIO) -> list[str] | None:
    """Answer requests; in a forked process return its command line."""
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if not pid:
                answers.close()
                _become(request)
                return list(request["start"])
            alive.add(pid)
            answer: int | None = pid
        else:
            pid = request.get("wait") or request["peek"]
            answer = _ended(pid, wait="wait" in request)
            if "wait" in request:
                alive.discard(pid)
        print(json.dumps(answer), file=answers, flush=True)
    for pid in alive:  # of tests that failed
        os.kill(pid, signal.SIGKILL)
    return None


def _ended(pid: int, *, wait: bool) -> int | None:
    """Return the exit code of a process; None if it does not end, or has not yet."""
    deadline = time.monotonic() + (PATIENCE_S if wait else 0)
    while True:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if wait else -1
        if time.monotonic() >= deadline:
            if wait:
                os.kill(pid, signal.SIGKILL)
            return None
        select.select([], [], [], 0.02)


def _become(request: Mapping[str, Any]) -> None:
    folder = Path(request["folder"])
    said = os.open(folder / "said", os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(ours, theirs)
    os.environ["IOFAULT_HOLD"] = str(folder)
    ctypes.CDLL(None).iofault_set(request["faults"].encode())


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is imported talks
    for name in MODULES:
        importlib.import_module(name)
    load_kernel()  # once for all of them
    gc.collect()
    gc.freeze()  # no command walks through what was imported when it ends
    arguments = _serve(answers)
    if arguments is None:
        return
    from checkpoint import interrupts
    from megatrain import ckpt_cli, cli

    interrupts.install = functools.partial(interrupts.install, GRACE_S)
    program, *rest = arguments
    sys.argv = [program, *rest]
    {"megatrain": cli.main, "megatrain-ckpt": ckpt_cli.main}[program]()


if __name__ == "__main__":
    _main()
