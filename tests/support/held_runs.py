"""Commands in processes of their own, whose transfers fail or are held below the interpreter.

One process imports what a run needs, with the shim loaded, and forks for each command.
"""

from __future__ import annotations

import ctypes
import functools
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
from typing import Any

from tests.support.faults import Fault, faulty_environment

HELD = 9999  # as ``Fault.errno``: the call waits until it is let go
GRACE_S = 0.3
PATIENCE_S = 120
MODULES = (
    "deepspeed.ops.op_builder",
    "transformers.models.llama.modeling_llama",
    "megatrain.ckpt_cli",
    "megatrain.run",
)


@dataclass(slots=True, kw_only=True)
class Command:
    """A command that runs. ``said`` is what it wrote so far, to both of its outputs."""

    pid: int
    folder: Path
    _driver: Driver

    def wait_until_held(self) -> None:
        """Return when a call is held."""
        fd = os.open(self.folder / "held", os.O_RDONLY | os.O_NONBLOCK)
        try:
            ready, _, _ = select.select([fd], [], [], PATIENCE_S)
            assert ready, f"no call was held: {self.said}"
        finally:
            os.close(fd)

    def let_go(self) -> None:
        """Let the held call go on."""
        os.close(os.open(self.folder / "go", os.O_WRONLY))

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
        for name in ("held", "go"):
            os.mkfifo(folder / name)
        (folder / "said").touch()
        text = ";".join(map(str, faults))
        pid = self.ask(start=list(arguments), folder=str(folder), faults=text)
        return Command(pid=pid, folder=folder, _driver=self)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def _serve() -> list[str] | None:
    """Answer requests; in a forked process return its command line."""
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if not pid:
                _become(request)
                return list(request["start"])
            answer: int | None = pid
        else:
            answer = _ended(request.get("wait") or request["peek"], wait="wait" in request)
        print(json.dumps(answer), flush=True)
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
    os.environ |= {"IOFAULT_HELD": str(folder / "held"), "IOFAULT_GO": str(folder / "go")}
    ctypes.CDLL(None).iofault_set(request["faults"].encode())


def _main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    arguments = _serve()
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
