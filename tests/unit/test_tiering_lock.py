from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiering_stores import (
    RECORDS,
    assert_state,
    fill,
    make_store,
    memory_folder,
    small_chunks,
)
from tiering import lock
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


@pytest.mark.parametrize("commits", [1, 3])
def test_a_commit_between_a_readers_look_at_the_root_and_its_hold_is_noticed(
    monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    with small_chunks(), memory_folder() as folder:
        store = make_store(folder / "store", seed=1)
        pending = iter(range(2, 2 + commits))
        original = lock.hold

        def hold_late(path: Path) -> int | None:
            """Drop the generation just before it is held, and write into its slot."""
            for seed in pending:
                with open_writer(store) as writer:
                    fill(writer, seed)
            return original(path)

        monkeypatch.setattr(lock, "hold", hold_late)
        with open_reader(store) as reader:
            assert_state(reader, 1 + commits)
        monkeypatch.undo()
        with open_writer(store) as writer:
            fill(writer, 9)
            assert writer.begin(wait_s=0) in writer.slots, "a reader that went on left its hold"


def test_a_hold_taken_while_the_generation_is_dropped_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commit falls between the reader's open of the manifest and its second look."""
    with small_chunks(), memory_folder() as folder:
        store = make_store(folder / "store", seed=1)
        original = lock.hold
        pending = [2]

        def hold_then_commit(path: Path) -> int | None:
            fd = original(path)
            while pending:
                with open_writer(store) as writer:
                    fill(writer, pending.pop())
            return fd

        monkeypatch.setattr(lock, "hold", hold_then_commit)
        with open_reader(store) as reader:
            assert_state(reader, 2)
        with open_writer(store) as writer:
            assert writer.begin(wait_s=0) == 0
