"""Whatever changes a store, recorded, with what a power cut may leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.loops import memory_mount
from tests.support.power_cut import Recording
from tests.support.tiering_stores import (
    assert_state,
    fill,
    make_store,
    memory_folder,
    small_chunks,
    small_record,
)
from tiering.store import open_reader, open_writer
from tiering.slots import slot_folder
from tiering.zarr_documents import shard_index

RECORDS = (
    small_record("a", "float32", 4097),
    small_record("b", "bfloat16", 10),
    small_record("c", "float32", 3, shared=True),
    small_record("d", "float32", 4097, codec="blosc-lz4-bitshuffle"),
)


@contextmanager
def workplace(drives: int = 2) -> Iterator[tuple[Path, list[Path]]]:
    """Lend a folder in memory and file systems mounted in it, one for each drive."""
    with small_chunks(), memory_folder() as folder, ExitStack() as stack:
        names = [f"drive{number}" for number in range(drives)]
        yield (
            folder,
            [stack.enter_context(memory_mount(folder, "tmpfs", name=name)) for name in names],
        )


def assert_whole(store: Path, steps: set[int]) -> list[int]:
    """Check every byte of every listed generation; the current one is of one of ``steps``."""
    with open_reader(store) as reader:
        assert reader.manifest.step in steps, f"step {reader.manifest.step}, expected {steps}"
        assert_state(reader, reader.manifest.step)
        others = reader.root.generations[:-1]
    for generation in others:
        with open_reader(store, generation=generation.number) as reader:
            assert_state(reader, generation.step)
    return [generation.step for generation in others]


def assert_goes_on(store: Path, retain: int) -> None:
    """Check that another step can be committed, and that nothing is left over of what was lost."""
    with open_writer(store) as writer:
        writer.ensure_slots(retain + 1)
        generation = fill(writer, 9, retain=retain)
        for slot in writer.slots:
            assert_indexes(writer, slot)
        listed = {str(g.number) for g in writer.root.generations}
    assert_whole(store, {9})
    assert {path.name for path in (store / "manifests").iterdir()} == listed
    assert not (store / "CREATING").exists()


def assert_indexes(writer, slot: int) -> None:
    """Check that a slot's files are Zarr shards for whoever does not know the geometry."""
    for name, record in writer.records.items():
        for shard in range(record.geometry.shard_count if record.codec is None else 0):
            data = (slot_folder(writer.path, slot) / name / "c" / str(shard)).read_bytes()
            assert data.endswith(shard_index(record, shard)), f"index of {name} {shard} in {slot}"


def record_commits(folder: Path, drives: list[Path], *, retain: int) -> Recording:
    """Record opening a store and committing twice; a step is of a power cut's outcomes."""
    store = make_store(folder / "store", records=RECORDS, drives=drives, slots=retain + 1)
    for seed in range(2, retain + 1):
        with open_writer(store) as writer:
            fill(writer, seed, retain=retain)
    recording = Recording(folder)
    recording.allow({retain})
    with recording.running(), open_writer(store) as writer:
        for step in (retain + 1, retain + 2):
            recording.allow({step - 1, step})
            fill(writer, step, retain=retain)
            recording.allow({step})
    return recording
