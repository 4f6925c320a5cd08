from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hf_cli import run
from tests.support.tiering_stores import (
    assert_state,
    fill,
    make_store,
    memory_folder,
    small_chunks,
)
from tiering.generations import read_root
from tiering.store import open_reader, open_writer

READ = """
import sys
from tiering import records
from tiering.store import open_reader
records.CHUNK_LENGTH = 4096
reader = open_reader(sys.argv[1], generation=int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(name="store")
def _store() -> Iterator[Path]:
    """Three generations in three of four slots."""
    with small_chunks(), memory_folder() as folder:
        store = make_store(folder / "store", slots=4)
        with open_writer(store) as writer:
            for seed in (2, 3):
                fill(writer, seed, retain=3)
        yield store


def allocated(store: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in (store / "shards").iterdir())


def everything(store: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in store.rglob("*") if path.name != "LOCK"}


def listed(store: Path) -> list[int]:
    return [g.number for g in read_root(store).generations]


def test_without_yes_it_says_what_it_would_drop_and_changes_nothing(store: Path) -> None:
    before = everything(store)
    said = run("prune", store).stdout
    assert "keeps generation 3" in said
    assert "drops generation 1 (step 1)" in said
    assert "drops generation 2 (step 2)" in said
    assert "in 2 slots" in said
    assert "--yes" in said
    assert everything(store) == before


def test_it_frees_what_it_said(store: Path) -> None:
    planned = json.loads(run("prune", store, "--keep", 2, "--json").stdout)
    before = allocated(store)
    done = json.loads(run("prune", store, "--keep", 2, "--yes", "--json").stdout)
    assert done == planned | {"done": True}
    assert (done["kept"], done["newest"], done["slots"]) == ([2, 3], 3, [3])
    assert before - allocated(store) == done["nbytes"] > 0
    assert listed(store) == [2, 3]
    for number in (2, 3):
        with open_reader(store, generation=number) as reader:
            assert_state(reader, number)
    again = run("prune", store, "--keep", 2, "--yes")
    assert "nothing to drop" in again.stdout


def test_a_damaged_newest_generation_is_dropped_and_named(store: Path) -> None:
    os.truncate(store / "manifests/3/manifest.json", 7)
    run("inspect", store, code=3)
    said = run("prune", store, "--keep", 2, "--yes").stdout
    assert "keeps generation 1, 2; 2 becomes 4" in said
    assert "dropped generation 3 (step 3), which is damaged: " in said
    assert "manifests/3/manifest.json" in said
    assert listed(store) == [1, 4]
    with open_reader(store) as reader:
        assert_state(reader, 2)


def reading(store: Path, generation: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", READ, str(store), str(generation)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_what_a_process_reads_stays_until_it_is_killed(store: Path) -> None:
    process = reading(store, 2)
    try:
        assert "slot 1 stays while it is being read" in run("prune", store).stdout
        run("prune", store, "--yes")
        assert (store / "slots/1").is_dir()
        assert listed(store) == [3]
    finally:
        process.kill()
        process.communicate()
    report = json.loads(run("prune", store, "--yes", "--json").stdout)
    assert (report["held"], report["slots"]) == ([], [1])
    assert not (store / "slots/1").exists()
    with open_reader(store) as reader:
        assert_state(reader, 3)


def test_a_store_that_is_being_written_is_not_pruned(store: Path) -> None:
    with open_writer(store):
        assert f"pid {os.getpid()}" in run("prune", store, "--yes", code=4).stderr


def test_a_writer_goes_on_when_the_reader_that_it_waits_for_is_killed(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run("prune", store, "--yes")  # one generation, one free slot
    process = reading(store, 3)
    with open_writer(store) as writer:
        fill(writer, 4)
        assert writer.generations[0].slot != 2

        def killed_meanwhile(message: str) -> bool:
            if f"pid {process.pid}" in message:
                process.kill()
                process.communicate()
            return True

        caplog.handler.addFilter(lambda record: killed_meanwhile(record.getMessage()))
        assert writer.begin(wait_s=60) == 2
    assert any(f"read by pid {process.pid}" in r.getMessage() for r in caplog.records)
    assert process.returncode == -9


def test_spare_slots_are_written_to_while_a_dropped_generation_is_read(store: Path) -> None:
    process = reading(store, 3)
    try:
        with open_writer(store) as writer, open_reader(store) as reader:
            for seed in (4, 5, 6, 7):
                fill(writer, seed)
                assert_state(reader, 3)
    finally:
        process.kill()
        process.communicate()
