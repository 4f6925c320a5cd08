"""Runs in a process of their own, whose memory is looked at while they run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import RunConfig

REPOSITORY = Path(__file__).parents[2]
GROUPS = Path("/sys/fs/cgroup/memory")

# Says what the plan was, what the process had locked and what its arenas held in a step, the peak
# at the end, and how the run ended.
SCRIPT = """
import json, sys
from pathlib import Path
from megatrain import engine, run
from megatrain.config import RunConfig
from megatrain.planner import Plan
from megatrain.trainer import Stop
from tests.support.runs import Quiet
from tiering.errors import MegatrainError
from tiering.process import status_nbytes

found = {}
arenas = {}
allocate = engine._arenas

def seen(*args):
    arenas.update(allocate(*args))
    return arenas

engine._arenas = seen

def look(row):
    found["locked"] = status_nbytes("VmLck")
    found["tables"] = {str(tier): arena.table() for tier, arena in arenas.items()}

observer = Quiet(after=look)
try:
    run.train(RunConfig.from_json(Path(sys.argv[1]).read_text()), observer, Stop())
except MegatrainError as error:
    found["refused"] = str(error)
plan = observer.plan
if plan is not None:
    found["total"] = plan.total_nbytes
    found["arenas"] = plan.arenas_nbytes
    found["lock"] = plan.footprint.lock
    found["planned"] = {str(tier): table for tier, table in plan.tables().items() if table}
found["peak"] = status_nbytes("VmHWM")
found["virtual"] = status_nbytes("VmPeak")
found["still_locked"] = status_nbytes("VmLck")
print(json.dumps(found))
"""

# Without CAP_IPC_LOCK also after the next program is started, and with a small limit.
ORDINARY = """
import ctypes, os, resource, sys
ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def observed(
    config: RunConfig, *, group: Path | None = None, lock_limit: int | None = None
) -> dict[str, Any]:
    """Run ``config`` in a process of its own and return what it noted.

    ``group`` is a control group to run it in; ``lock_limit`` is what an ordinary user may lock.
    """
    path = config.out.with_suffix(".json")
    path.write_text(config.to_json())
    command = [sys.executable, "-c", SCRIPT, str(path)]
    if lock_limit is not None:
        command = [sys.executable, "-c", ORDINARY, str(lock_limit), *command[1:]]
    if group is not None:
        enter = f'echo $$ > {group / "cgroup.procs"} && exec "$@"'
        command = ["sh", "-c", enter, "sh", *command]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    shutil.rmtree(config.out, ignore_errors=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def memory_group(nbytes: int) -> Iterator[Path]:
    """Make a control group (version 1) that allows ``nbytes``, and remove it."""
    if not (GROUPS / "memory.limit_in_bytes").exists() or not os.access(GROUPS, os.W_OK):
        pytest.skip("needs root and the memory controller of control groups version 1")
    group = GROUPS / f"megatrain-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        yield group
    finally:
        group.rmdir()
