from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiering_stores import fill, make_store, memory_folder, small_chunks
from tiering.errors import LockedError
from tiering.lock import StoreLock, lock_holder
from tiering.store import create_store, open_reader, open_writer

HOLD = """
import sys
from tiering.store import open_writer
writer = open_writer(sys.argv[1], run_id="run-7")
print("ready", flush=True)
sys.stdin.read()
"""


def _holder(store: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_store_in_use_is_refused_by_the_name_of_its_holder(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    process = _holder(store)
    try:
        with pytest.raises(LockedError) as caught:
            open_writer(store)
        assert f"pid {process.pid} on " in str(caught.value)
        assert "run run-7" in str(caught.value)
        assert caught.value.exit_code == 4
        assert f"pid {process.pid}" in (lock_holder(store / "LOCK") or "")
        with open_reader(store):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    open_writer(store).close()
    assert lock_holder(store / "LOCK") is None


def test_a_creation_in_progress_is_not_taken_for_remains(tmp_path: Path) -> None:
    store = tmp_path / "store"
    from tests.support.tiering_stores import RECORDS

    with create_store(store, records=RECORDS, schema_files={}) as writer:
        with (
            pytest.raises(LockedError, match=f"pid {os.getpid()}"),
            create_store(store, records=RECORDS, schema_files={}),
        ):
            pass
        fill(writer, 1)
    open_reader(store).close()


def test_a_lock_is_free_after_close(tmp_path: Path) -> None:
    for _ in range(2):
        with StoreLock(tmp_path / "LOCK"), pytest.raises(LockedError):
            StoreLock(tmp_path / "LOCK")


def test_a_writer_waits_for_readers_and_names_them() -> None:
    with small_chunks(), memory_folder() as folder:
        store = make_store(folder / "store", seed=1)
        reader = open_reader(store)
        with open_writer(store) as writer:
            fill(writer, 2)
            with pytest.raises(LockedError, match=f"read by pid {os.getpid()}"):
                writer.begin(wait_s=0)
            reader.close()
            assert writer.begin(wait_s=0) == 0
