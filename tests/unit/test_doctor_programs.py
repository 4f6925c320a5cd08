"""What the doctor says of the programs it depends on: compiled kernel, kvikio, names, versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.doctor import adam, gds, packages, trial
from megatrain.doctor.findings import Finding, Verdict
from megatrain.doctor.versions import version_findings
from megatrain.optimizer import build_folder, load_kernel
from tiering.backends.choice import Kvikio

REPOSITORY = Path(__file__).parents[2]


def about(findings) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


# -- trials --------------------------------------------------------------------------------------


def test_a_trial_that_crashes_takes_nobody_along():
    with pytest.raises(trial.TrialError, match="was killed by SIGSEGV"):
        trial.run("import ctypes; ctypes.string_at(0)")
    with pytest.raises(trial.TrialError, match="ValueError: no"):
        trial.run("raise ValueError('no')")


def test_a_trial_does_not_take_modules_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    (tmp_path / "tiering.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = trial.run("import json, tiering.errors; print(tiering.__file__)").strip()
    assert Path(found).parents[1] == REPOSITORY


# -- the compiled kernel -------------------------------------------------------------------------


@pytest.mark.parametrize("root", [None, "mine"])
def test_the_kernel_is_looked_for_where_torch_puts_it_and_nothing_is_made(
    tmp_path, monkeypatch, root
):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if root:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / root))
    found = adam.build_folder()
    assert list(tmp_path.iterdir()) == []
    assert found == build_folder("cpu_adam")


LOCKED = """
import sys
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_build_is_stale_once_the_build_was_killed(tmp_path):
    lock = tmp_path / "lock"
    command = [sys.executable, "-c", LOCKED, str(lock)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "locked\n"
        found = adam.lock_finding(adam.find_lock(lock))
        assert found.verdict is Verdict.NOTE
        assert found.values["holders"] == [child.pid]
        child.kill()
    os.utime(lock, (0, os.stat(lock).st_mtime - 7300))
    found = about(adam.adam_findings(tmp_path))["build lock"]
    assert found.verdict is Verdict.WARNING
    assert "is 2 hours old" in found.found
    assert f"rm {lock}" in found.advice
    assert lock.exists(), "the doctor only looks"


def test_without_a_lock_nothing_is_said_of_one(tmp_path):
    found = about(adam.adam_findings(tmp_path))
    assert "build lock" not in found
    assert found["CPU Adam"].verdict is Verdict.NOTE
    assert "not built yet" in found["CPU Adam"].found


def test_a_kernel_that_works_and_one_that_does_not(tmp_path):
    load_kernel()
    assert about(adam.adam_findings())["CPU Adam"].verdict is Verdict.OK
    (tmp_path / "cpu_adam.so").write_bytes(b"\x7fELF and then nothing")
    found = about(adam.adam_findings(tmp_path))["CPU Adam"]
    assert found.verdict is Verdict.PROBLEM
    assert str(tmp_path) in found.advice


def test_missing_tools_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "nice-compiler -O3")
    found = about(adam.adam_findings(tmp_path))["compiler"]
    assert found.verdict is Verdict.PROBLEM
    assert "nice-compiler, ninja" in found.found


# -- kvikio --------------------------------------------------------------------------------------


def test_kvikio_is_tried_without_harm():
    found = about(gds.gds_findings())
    assert found["kvikio"].verdict in (Verdict.OK, Verdict.NONE, Verdict.NOTE, Verdict.WARNING)
    assert found["kvikio"].found


@pytest.mark.parametrize(
    ("installed", "usable", "devices", "verdict"),
    [
        (False, False, 0, Verdict.NONE),
        (False, False, 1, Verdict.NOTE),
        (True, False, 0, Verdict.NONE),
        (True, False, 1, Verdict.WARNING),
        (True, True, 0, Verdict.OK),
    ],
)
def test_kvikio_is_missed_only_where_there_is_a_gpu(installed, usable, devices, verdict):
    found = Kvikio(installed=installed, usable=usable, said="how it is")
    told = gds.kvikio_finding(found, devices=devices)
    assert told.verdict is verdict
    assert "how it is" in told.found


def test_a_kernel_module_that_is_loaded_is_seen(tmp_path):
    assert about(gds.gds_findings(tmp_path))["nvidia-fs"].verdict is Verdict.NONE
    (tmp_path / "driver" / "nvidia-fs").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia-fs" / "version").write_text("version: 2.25.7\n")
    assert about(gds.gds_findings(tmp_path))["nvidia-fs"].verdict is Verdict.OK


# -- names ---------------------------------------------------------------------------------------


def names(folder: Path, *path: Path) -> list[Finding]:
    return list(packages.package_findings(folder, [str(REPOSITORY), *map(str, path)]))


def test_a_stray_file_with_our_name_is_named(tmp_path):
    (tmp_path / "checkpoint.py").write_text("")
    (here,) = names(tmp_path)
    assert here.verdict is Verdict.WARNING
    assert str(tmp_path / "checkpoint.py") in here.found
    assert "current folder" in here.found
    (there,) = names(REPOSITORY, tmp_path)
    assert "on Python's path" in there.found


def test_a_package_with_our_name_is_named_and_a_folder_of_data_is_not(tmp_path):
    (tmp_path / "checkpoint" / "step-100").mkdir(parents=True)
    (fine,) = names(tmp_path)
    assert fine.verdict is Verdict.OK
    (tmp_path / "tiering").mkdir()
    (tmp_path / "tiering" / "__init__.py").write_text("")
    (found,) = names(tmp_path)
    assert found.subject == "tiering"


def test_our_own_folder_clashes_with_nothing():
    (fine,) = names(REPOSITORY, REPOSITORY)
    assert fine.verdict is Verdict.OK


def test_another_distribution_with_our_name_is_named(tmp_path, monkeypatch):
    about = tmp_path / "othertool-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: othertool\nVersion: 1.0\n")
    (about / "top_level.txt").write_text("othertool\ncheckpoint\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = names(REPOSITORY)
    assert found.verdict is Verdict.PROBLEM
    assert "othertool" in found.found
    assert "pip uninstall othertool" in found.advice


@pytest.mark.parametrize("program", ["megatrain.cli", "megatrain.ckpt_cli"])
@pytest.mark.parametrize("name", ["checkpoint", "tiering"])
def test_a_module_that_takes_our_name_is_explained_by_every_command(tmp_path, program, name):
    (tmp_path / f"{name}.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"from {program} import main; main()", "--help"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert f"error: {name} is {tmp_path / name}.py, not MegaTrain's" in done.stderr
    assert "Traceback" not in done.stderr


def test_versions_are_those_of_this_interpreter():
    found = about(version_findings())
    assert sys.version.split()[0] in found["python"].found
    assert os.uname().release in found["kernel"].found
    assert {"torch", "deepspeed", "zarr"} <= found.keys()
