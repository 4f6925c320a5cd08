"""DeepSpeed's CPU Adam, which is compiled once on every machine."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatrain.doctor import trial
from megatrain.doctor.findings import Finding, Verdict

NAME = "cpu_adam"
_TRIAL = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location(sys.argv[1], sys.argv[2])
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
kernel.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
master, grad, m, v = torch.zeros(64), torch.ones(64), torch.zeros(64), torch.zeros(64)
kernel.adam_update(0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, False, master, grad, m, v)
kernel.destroy_adam(0)
assert abs(m - 0.1).max() < 1e-6 and (master < 0).all(), "its update is wrong"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The lock file of a build.

    Attributes:
        holders: Processes that have it open, or work in its folder; empty if none can be seen.
        all_seen: Whether every process of this machine could be looked at.
    """

    path: Path
    age_s: float
    holders: tuple[int, ...]
    all_seen: bool


def adam_findings(folder: Path | None = None) -> Iterator[Finding]:
    """Say whether the kernel is built and works, or can be built."""
    ready = _prebuilt()
    folder = build_folder() if folder is None else folder
    if ready is None:
        lock = find_lock(folder / "lock")
        if lock is not None:
            yield lock_finding(lock)
        built = folder / f"{NAME}.so"
        ready = built if built.exists() else None
    yield _kernel_finding(ready, folder)
    yield _tools_finding(needed=ready is None)


def build_folder() -> Path:
    """Return the folder in which torch compiles the kernel; torch's own answer would make it."""
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is not None:
        return Path(root) / NAME
    hip, cuda = torch.version.hip, torch.version.cuda
    target = f"rocm{hip}" if hip else f"cu{cuda}" if cuda else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return Path(get_default_build_root()) / f"{python}_{target.replace('.', '')}" / NAME


def _prebuilt() -> Path | None:
    """Return the kernel that DeepSpeed was installed with, if it was (DS_BUILD_CPU_ADAM=1)."""
    spec = importlib.util.find_spec("deepspeed")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder, "ops", "adam").glob(f"{NAME}_op*.so")):
            return file
    return None


def find_lock(path: Path) -> Lock | None:
    """Return what can be seen of the lock file at ``path``, or None if there is none."""
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None
    holders, all_seen = [], True
    for process in psutil.process_iter():
        try:
            opened = [file.path for file in process.open_files()]
            if str(path.resolve()) in opened or Path(process.cwd()) == path.parent.resolve():
                holders.append(process.pid)
        except psutil.AccessDenied:
            all_seen = False
        except psutil.NoSuchProcess:
            continue
    return Lock(path=path, age_s=age_s, holders=tuple(holders), all_seen=all_seen)


def lock_finding(lock: Lock) -> Finding:
    """Say whether a lock belongs to a build that runs."""
    age = f"{lock.path} is {_age(lock.age_s)} old"
    values = {"path": str(lock.path), "age_s": lock.age_s, "holders": list(lock.holders)}
    if lock.holders:
        return Finding(
            subject="build lock",
            verdict=Verdict.NOTE,
            found=f"{age}, held by process {', '.join(map(str, lock.holders))}",
            advice="wait for that build",
            values=values,
        )
    unseen = "" if lock.all_seen else " that may be looked at (others may not)"
    return Finding(
        subject="build lock",
        verdict=Verdict.WARNING,
        found=f"{age} and no process of this machine{unseen} holds it: a build that was killed "
        "left it",
        advice=f"megatrain train removes it; other programs wait for it forever: "
        f"rm {shlex.quote(str(lock.path))}",
        values=values,
    )


def _age(age_s: float) -> str:
    for seconds, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} seconds"


def _kernel_finding(file: Path | None, folder: Path) -> Finding:
    if file is None:
        return Finding(
            subject="CPU Adam",
            verdict=Verdict.NOTE,
            found=f"not built yet in {folder}; the first run compiles it, which takes a minute or "
            "more",
        )
    try:
        trial.run(_TRIAL, file.name.partition(".")[0], str(file))
    except trial.TrialError as error:
        return Finding(
            subject="CPU Adam",
            verdict=Verdict.PROBLEM,
            found=f"{file} is built, but does not work: {error}",
            advice=f"remove it, the next run compiles it anew: rm -r {shlex.quote(str(folder))}",
        )
    return Finding(
        subject="CPU Adam",
        verdict=Verdict.OK,
        found=f"built, loads and updates: {file}",
        values={"path": str(file)},
    )


def _tools_finding(*, needed: bool) -> Finding:
    """Say whether what compiles the kernel is here."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    missing += [] if headers.exists() else [str(headers)]
    if not missing:
        found = f"{shutil.which(compiler)}, ninja and Python.h are here"
        return Finding(subject="compiler", verdict=Verdict.OK, found=found)
    return Finding(
        subject="compiler",
        verdict=Verdict.PROBLEM if needed else Verdict.NOTE,
        found=f"not found: {', '.join(missing)}"
        + ("" if needed else "; needed when torch or DeepSpeed changes"),
        advice="install g++ and python3-dev; ninja comes with the virtual environment: activate it",
    )
