from __future__ import annotations

import fcntl
import os
import signal
import socket
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
from tiering import creation, lock
from tiering.errors import LockedError, RefusedError
from tiering.lock import StoreLock, lock_holder
from tiering.moving import move_store
from tiering.store import create_store, open_reader, open_writer

HOLD = """
import sys
from tiering.store import open_writer
writer = open_writer(sys.argv[1], run_id="run-7")
print("ready", flush=True)
sys.stdin.read()
"""

READ_AND_START = """
import subprocess, sys
from tiering import records
from tiering.store import open_reader
records.CHUNK_LENGTH = 4096
reader = open_reader(sys.argv[1])
other = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
print(other.pid, flush=True)
sys.stdin.read()
"""

READ_AND_FORK = """
import os, signal, sys
from tiering import records
from tiering.store import open_reader
records.CHUNK_LENGTH = 4096
reader = open_reader(sys.argv[1])
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""


def _started(program: str, store: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a program and return it with the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line
    return process, line


def _ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_a_store_in_use_is_refused_by_the_name_of_its_holder(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    process, _ = _started(HOLD, store)
    try:
        with pytest.raises(LockedError) as caught:
            open_writer(store)
        said = str(caught.value)
        assert f"in use by pid {process.pid} on {socket.gethostname()} since 20" in said
        assert said.endswith("(-c run run-7)")
        assert caught.value.exit_code == 4
        assert f"pid {process.pid}" in (lock_holder(store / "LOCK") or "")
        with open_reader(store):
            pass
    finally:
        _ended(process)
    open_writer(store).close()
    assert lock_holder(store / "LOCK") is None


def test_a_store_whose_lock_file_was_removed_is_refused_all_the_same(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    with open_writer(store):
        (store / "LOCK").unlink()
        for _ in range(2):
            with pytest.raises(LockedError, match=f"written by pid {os.getpid()}, .*removed LOCK"):
                open_writer(store)
        with pytest.raises(LockedError, match="removed LOCK"):
            move_store(store, [tmp_path])
    open_writer(store).close()


def test_the_drives_of_a_store_in_use_are_locked_too(tmp_path: Path) -> None:
    drives = [tmp_path / "one", tmp_path / "two"]
    for drive in drives:
        drive.mkdir()
    store = make_store(tmp_path / "store", drives=drives)
    with open_writer(store) as writer:
        (store / "LOCK").unlink()
        with pytest.raises(LockedError, match=rf"{drives[0]}.*somebody removed LOCK"):
            open_writer(store)
        fill(writer, 2)
    open_writer(store).close()


def test_who_waited_for_a_lock_file_that_is_removed_does_not_lock_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A creation that is given up removes its lock file; whoever has it open must look again."""
    path = tmp_path / "LOCK"
    flock, removals = lock._flock, iter([path])

    def flock_late(fd: int, kind: int, found: Path) -> bool:
        for removed in removals:
            removed.unlink()
        return flock(fd, kind, found)

    monkeypatch.setattr(lock, "_flock", flock_late)
    with StoreLock(path), pytest.raises(LockedError):
        StoreLock(path)


def test_a_holder_that_has_not_said_who_it_is_is_not_taken_for_the_one_before(
    tmp_path: Path,
) -> None:
    """It locks the file first and writes its text then."""
    path = tmp_path / "LOCK"
    path.write_text("pid 1 on elsewhere since 2001-01-01T00:00:00+00:00 (megatrain run old)\n")
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match=rf"pid 1 on elsewhere.*by pid {os.getpid()} here"):
            StoreLock(path)


def test_a_process_that_a_reader_starts_keeps_nothing(tmp_path: Path) -> None:
    with small_chunks(), memory_folder() as folder:
        store = make_store(folder / "store", seed=1)
        process, other = _started(READ_AND_START, store)
        try:
            with open_writer(store) as writer:
                fill(writer, 2)
                with pytest.raises(LockedError, match=f"read by pid {process.pid}$"):
                    writer.begin(wait_s=0)
                _ended(process)
                assert writer.begin(wait_s=0) == 0
        finally:
            os.kill(int(other), signal.SIGKILL)


def test_a_hold_that_a_forked_process_keeps_is_named_by_that_process(tmp_path: Path) -> None:
    with small_chunks(), memory_folder() as folder:
        store = make_store(folder / "store", seed=1)
        process, child = _started(READ_AND_FORK, store)
        _ended(process)
        try:
            with open_writer(store) as writer:
                fill(writer, 2)
                with pytest.raises(LockedError, match=f"read by pid {child}$"):
                    writer.begin(wait_s=0)
        finally:
            os.kill(int(child), signal.SIGKILL)


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


def test_a_creation_that_comes_too_late_leaves_the_store_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one ends between this one's look at the folder and its lock."""
    store = tmp_path / "store"
    store.mkdir()
    others = iter([store])

    def lock_late(path: Path) -> StoreLock:
        for other in others:
            make_store(other, seed=1)
        return StoreLock(path)

    monkeypatch.setattr(creation, "StoreLock", lock_late)
    with (
        pytest.raises(RefusedError, match="is a store"),
        create_store(store, records=RECORDS, schema_files={}),
    ):
        pass
    with open_reader(store) as reader:
        assert_state(reader, 1)


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
