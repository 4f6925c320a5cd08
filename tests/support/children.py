"""Real commands in children of a process that has imported everything and computed nothing.

A child costs what the command costs, not what its imports cost. Faults are armed in it before it
begins, below the interpreter; it can be killed at a moment of choice, and is when it hangs.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.support.faults import Fault, as_text, faulty_environment

MODULES = (
    "deepspeed.ops.op_builder",
    "transformers.models.llama.modeling_llama",
    "zarr",
    "tqdm",
    "rich.console",
    "checkpoint.convert",
    "checkpoint.export",
    "checkpoint.render",
    "checkpoint.shard",
    "megatrain.ckpt_cli",
    "megatrain.progress",
    "megatrain.run",
)
_SAMPLE_NBYTES = 1 << 20  # how much a drive is measured with, instead of 64 MiB
COMMANDS = {
    "megatrain": "megatrain.cli:main",
    "megatrain-ckpt": "megatrain.ckpt_cli:main",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit status; minus the number of the signal that killed it.
        seen: For each fault the calls that it could have hit; ``hits``: those that it did.
        last: The last call that a fault could have hit.
        lanes: What each lane was doing, by its name, as far as it was doing something.
    """

    code: int
    hung: bool
    out: str
    err: str
    seen: tuple[int, ...]
    hits: tuple[int, ...]
    last: str
    lanes: dict[str, str]
    elapsed_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A SIGKILL ``delay_us`` after the start; or after ``lane`` began its operation ``number``."""

    delay_us: int = 0
    lane: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    command: Sequence[str]
    faults: str
    kill: dict[str, Any] | None
    timeout_s: float
    environment: dict[str, str] = field(default_factory=dict)


class Children:
    """Runs commands, one at a time, each in a new child."""

    def __init__(
        self, shim: Path, modules: Sequence[str] = MODULES, timeout_s: float = 120.0
    ) -> None:
        self._timeout_s = timeout_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.children", *modules],
            env={**faulty_environment(shim, ()), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        command: Sequence[str | Path],
        *faults: Fault,
        kill: Kill | None = None,
        timeout_s: float | None = None,
    ) -> Ended:
        """Run ``command``: ``megatrain``, ``megatrain-ckpt`` or ``module:function``, with words."""
        request = _Request(
            command=[str(word) for word in command],
            faults=as_text(faults),
            kill=asdict(kill) if kill else None,
            timeout_s=timeout_s or self._timeout_s,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the parent of the commands ended with {self._process.wait()}"
        answer = json.loads(line)
        counted = len(faults)
        return Ended(
            **answer | {key: tuple(answer[key][:counted]) for key in ("seen", "hits")},
        )

    def close(self) -> None:
        """End the parent of the commands."""
        self._process.communicate()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- in the parent of the commands -----------------------------------------------------------------


def _serve(modules: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in modules:
        importlib.import_module(module)
    prepare()
    shim = ctypes.CDLL(None)
    shim.iofault_last.restype = ctypes.c_char_p
    lanes = _LaneBoard()
    gc.collect()
    gc.freeze()  # what the children share stays shared
    for line in sys.stdin:
        request = _Request(**json.loads(line))
        print(json.dumps(_run(request, shim, lanes)), file=answers, flush=True)


def prepare() -> None:
    """Do what every command would do again and what decides nothing."""
    from megatrain.optimizer import load_kernel
    from tiering import bandwidth

    load_kernel()  # it asks a process of its own what the processor can do
    bandwidth.measure.__defaults__ = (_SAMPLE_NBYTES,)


class _LaneBoard:
    """What each lane of a child is doing, in memory that outlives the child."""

    def __init__(self) -> None:
        from megatrain.ops import Kind, Lane

        self._lanes = {lane: number for number, lane in enumerate(Lane)}
        self._kinds = list(Kind)
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def clear(self) -> None:
        self._memory[:] = bytes(len(self._memory))

    def read(self) -> dict[str, str]:
        kinds = {str(lane): self._memory[number] for lane, number in self._lanes.items()}
        return {lane: str(self._kinds[kind - 1]) for lane, kind in kinds.items() if kind}

    def watch(self, on_begun: Callable[[str], None]) -> None:
        """Note every operation of this process's lanes, and call ``on_begun`` with its lane."""
        from megatrain.lanes import CpuLanes

        perform = CpuLanes._perform

        def noted(lanes: CpuLanes, op: Any, job: Any) -> None:
            at = self._lanes[op.lane]
            self._memory[at] = self._kinds.index(op.kind) + 1
            on_begun(str(op.lane))
            perform(lanes, op, job)
            self._memory[at] = 0

        CpuLanes._perform = noted  # type: ignore[method-assign]


def _run(request: _Request, shim: Any, lanes: _LaneBoard) -> dict[str, Any]:
    shim.iofault_set(request.faults.encode())
    lanes.clear()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            _be_child(request, shim, lanes, out, err)
        code, hung, cpu_s = _awaited(pid, request.timeout_s)
        elapsed_s = time.perf_counter() - started
        counts = range(request.faults.count(";") + 1 if request.faults else 0)
        answer = {
            "code": code,
            "hung": hung,
            "out": _content(out),
            "err": _content(err),
            "seen": [shim.iofault_seen(i) for i in counts],
            "hits": [shim.iofault_hits(i) for i in counts],
            "last": shim.iofault_last().decode(errors="replace"),
            "lanes": lanes.read(),
            "elapsed_s": elapsed_s,
            "cpu_s": cpu_s,
        }
    shim.iofault_set(b"")
    return answer


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _awaited(pid: int, timeout_s: float) -> tuple[int, bool, float]:
    """Return the exit status of a child, whether it had to be killed, and its seconds of CPU."""
    pidfd = os.pidfd_open(pid)
    try:
        hung = not select.select([pidfd], [], [], timeout_s)[0]
        if hung:
            os.kill(pid, signal.SIGKILL)
        _, status, used = os.wait4(pid, 0)
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(status), hung, used.ru_utime + used.ru_stime


def _be_child(request: _Request, shim: Any, lanes: _LaneBoard, out: IO[str], err: IO[str]) -> None:
    """Run the command as an interpreter of its own would, and end with its exit status."""
    code = 1
    try:
        for number, source in ((1, out), (2, err)):
            os.dup2(source.fileno(), number)
        faulthandler.dump_traceback_later(max(1.0, request.timeout_s - 5.0))
        _arm(request.kill, shim, lanes)
        code = exit_status(request.command)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _arm(kill: dict[str, Any] | None, shim: Any, lanes: _LaneBoard) -> None:
    if kill is None:
        return
    wanted = Kill(**kill)
    if not wanted.lane:
        lanes.watch(lambda lane: None)
        shim.iofault_kill_in(ctypes.c_long(wanted.delay_us))
        return
    left = wanted.number

    def on_begun(lane: str) -> None:
        nonlocal left
        if lane == wanted.lane:
            left -= 1
            if left == -1:
                shim.iofault_kill_in(ctypes.c_long(wanted.delay_us))

    lanes.watch(on_begun)


def exit_status(command: Sequence[str]) -> int:
    """Run ``command`` on the files 0, 1 and 2 as they are now, and return its exit status."""
    # the streams of the parent know what its own files can do: one that can seek, for example
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    name, *words = command
    module, _, function = COMMANDS.get(name, name).partition(":")
    try:
        sys.argv = [name, *words]
        entry = getattr(importlib.import_module(module), function)
        entry(*(() if name in COMMANDS else words))
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - printed as the interpreter does
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve(sys.argv[1:])
