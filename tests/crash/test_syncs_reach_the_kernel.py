"""What the recordings of power cuts take on trust: that each sync is a call of the kernel's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.support.faults import Fault, build_shim, run_with_faults

SYNC = """
import os, sys
from pathlib import Path
from tiering import fsops
from tiering.errors import StorageError
folder = Path(sys.argv[2])
file = folder / "file"
file.write_bytes(b"old")
fd = os.open(file, os.O_RDWR)
syncs = {
    "write_file": lambda: fsops.write_file(folder / "new", b"new"),
    "fsync_file": lambda: fsops.fsync_file(file),
    "fsync_open": lambda: fsops.fsync_open(fd, file),
    "fsync_dir": lambda: fsops.fsync_dir(folder),
    "sync_drive": lambda: fsops.sync_drive(fd, folder),
}
try:
    syncs[sys.argv[1]]()
except StorageError as error:
    sys.exit(f"{error.path} {error.errno}")
"""


@pytest.fixture(name="shim", scope="module")
def _shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize(
    ("sync", "calls", "named"),
    [
        ("write_file", 1, "new"),
        ("fsync_file", 1, "file"),
        ("fsync_open", 1, "file"),
        ("fsync_dir", 1, ""),
        ("sync_drive", 2, ""),  # some file systems need the second to flush the drive's cache
    ],
)
def test_each_call_of_a_sync_is_made_and_its_failure_is_told(
    tmp_path: Path, shim: Path, sync: str, calls: int, named: str
) -> None:
    arguments = ["-c", SYNC, sync, str(tmp_path)]
    for number in range(calls):
        (tmp_path / "new").unlink(missing_ok=True)
        fault = Fault(op="sync", path=str(tmp_path), after=number, count=1, errno=errno.EIO)
        ended = run_with_faults(arguments, shim=shim, faults=[fault])
        assert ended.returncode == 1, f"call {number} is not made\n{ended.stderr}"
        assert f"{tmp_path / named} {errno.EIO}" in ended.stderr
    (tmp_path / "new").unlink(missing_ok=True)
    assert run_with_faults(arguments, shim=shim, faults=[]).returncode == 0
