"""Power cuts of real file systems: shut down with everything that is not on the drive lost."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.loops import Mount, loop_mount
from tests.support.tiering_stores import assert_state, fill, make_store, small_chunks, small_record
from tiering import fsops
from tiering.store import open_reader, open_writer

RECORDS = (
    small_record("a", "float32", 4 * 4096 + 1),
    small_record("b", "bfloat16", 3 * 4096),
    small_record("c", "float32", 3, shared=True),
    small_record("d", "float32", 4097, codec="blosc-lz4-bitshuffle"),
)
_GOING_DOWN = 0x8004587D  # the same number on ext4 and XFS
_NO_LOG_FLUSH = struct.pack("I", 2)

pytestmark = pytest.mark.root


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A store with a drive of its own, on file systems whose power can be cut."""

    mounts: Sequence[Mount]
    store: Path

    def cut(self) -> None:
        """Lose all that is not on the drives; nothing can be read or written after that."""
        for mount in self.mounts:
            fd = os.open(mount.point, os.O_RDONLY)
            fcntl.ioctl(fd, _GOING_DOWN, _NO_LOG_FLUSH)
            os.close(fd)

    def start(self) -> None:
        """Mount again what was cut."""
        for mount in self.mounts:
            subprocess.run(["umount", mount.point], check=True)
            subprocess.run(["mount", mount.device, mount.point], check=True)

    def run_and_cut(self, action: Callable[[], None]) -> None:
        """Do this in another process, cut the power when it ends, and start again."""
        in_other_process(action)
        self.cut()
        self.start()

    def step(self) -> int:
        """Check every byte of the current generation and return its step."""
        with open_reader(self.store) as reader:
            assert_state(reader, reader.manifest.step)
            return int(reader.manifest.step)


@pytest.fixture(name="machine", params=["ext4", "xfs"])
def _machine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    with (
        small_chunks(),
        loop_mount(tmp_path, filesystem=request.param, name="one") as one,
        loop_mount(tmp_path, filesystem=request.param, name="two") as two,
    ):
        drives = [one.point, two.point]
        store = make_store(one.point / "store", records=RECORDS, drives=drives)
        yield Machine(mounts=(one, two), store=store)


class Stop(BaseException):
    """Ends what a process does there and then."""


def in_other_process(action: Callable[[], None]) -> None:
    """Run ``action`` until it ends or raises Stop, in a process that cleans nothing up."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except Stop:
            pass
        except BaseException:  # noqa: BLE001 - whatever it is, the parent must see it
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "see stderr"


def commit(store: Path, step: int, *, stop_before: int = -1) -> int:
    """Commit a step; stop before a durable operation of that number. Return how many there are."""
    count = 0

    def observe(_action: str, _path: Path) -> None:
        nonlocal count
        if count == stop_before:
            raise Stop
        count += 1

    with open_writer(store) as writer, fsops.observed(observe):
        fill(writer, step)
    return count


def operations(store: Path, step: int) -> list[tuple[str, str]]:
    """Commit a step and return its durable operations."""
    found: list[tuple[str, str]] = []
    with open_writer(store) as writer, fsops.observed(lambda a, p: found.append((a, p.name))):
        fill(writer, step)
    return found


def test_a_cut_between_the_steps_of_a_commit_leaves_the_old_or_the_new_generation(
    machine: Machine,
) -> None:
    steps = operations(machine.store, 2)
    first = steps.index(("sync", next(name for action, name in steps if action == "sync")))
    newest, outcomes = 2, {}
    renamed = steps.index(("rename", "zarr.json"))
    for number in [*range(first, renamed - 1, 3), *range(renamed - 1, renamed + 4), len(steps)]:
        machine.run_and_cut(lambda: commit(machine.store, newest + 1, stop_before=number))
        outcomes[number] = machine.step() - newest
        newest += 1
        commit(machine.store, newest + 1)
        newest += 1
        assert machine.step() == newest
    assert {found for at, found in outcomes.items() if at <= renamed} == {0}, "not renamed yet"
    assert {found for at, found in outcomes.items() if at > renamed + 2} == {1}, "name was synced"


def _commit_until_renamed(store: Path, step: int) -> None:
    names = operations(store, step)
    stop = names.index(("rename", "zarr.json")) + 1
    commit(store, step + 1, stop_before=stop)


def _forgetting(*forgotten: Path, then: Callable[[], None]) -> None:
    """Do this with a program that never syncs these; only in another process."""
    folder, file = fsops.fsync_dir, fsops.fsync_file
    fsops.fsync_dir = lambda path: None if path in forgotten else folder(path)
    fsops.fsync_file = lambda path: None if path in forgotten else file(path)
    then()


def _resume(store: Path) -> None:
    with open_writer(store) as writer:
        slot = writer.begin()  # that of generation 2, which the drive must not name any more
        writer.write(slot, "b", 0, memoryview(b"x" * writer.records["b"].nbytes))


def test_a_kill_after_the_rename_and_a_cut_after_the_next_open_lose_nothing(
    machine: Machine,
) -> None:
    in_other_process(lambda: _commit_until_renamed(machine.store, 2))
    assert machine.step() == 3
    machine.run_and_cut(lambda: _resume(machine.store))
    assert machine.step() == 3


# What is forgotten here is what a real drive takes as a licence to forget.


def _commit(store: Path) -> None:
    commit(store, 2)


def test_without_the_sync_of_its_name_a_commit_is_lost(machine: Machine) -> None:
    machine.run_and_cut(lambda: _forgetting(machine.store, then=lambda: _commit(machine.store)))
    with open_reader(machine.store) as reader:
        assert reader.manifest.step == 1


def test_without_the_sync_when_opening_a_kill_and_a_cut_lose_both_generations(
    machine: Machine,
) -> None:
    in_other_process(lambda: _commit_until_renamed(machine.store, 2))
    # All that opening syncs: these file systems write the name too when any other file is synced.
    synced = [machine.store, *machine.store.glob("zarr.json"), *machine.store.glob("slots/**/")]
    synced += machine.store.glob("slots/*/zarr.json")
    machine.run_and_cut(lambda: _forgetting(*synced, then=lambda: _resume(machine.store)))
    with pytest.raises(AssertionError, match="b\n"):
        machine.step()
