"""A store driven at random against a plain dictionary of generations.

Commits, readers, roll-backs and prunes come in any order, and generations are damaged in between.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.tiering_stores import (
    assert_state,
    content,
    fill,
    make_store,
    memory_folder,
    small_chunks,
    small_record,
)
from tiering.errors import CorruptionError, LockedError, RefusedError
from tiering.generations import read_root
from tiering.store import (
    StoreReader,
    StoreWriter,
    open_newest_whole,
    open_reader,
    open_writer,
)

RECORDS = (
    small_record("a", "float32", 4099),
    small_record("b", "bfloat16", 10),
    small_record("c", "float32", 3, shared=True),
    small_record("d", "float32", 8 * 4096 + 5, codec="zstd"),
    small_record("e", "bfloat16", 7, shared=True, codec="none"),
)


DAMAGE: dict[str, Callable[[Path, int, int], object]] = {
    "manifest cut": lambda s, n, k: os.truncate(s / f"manifests/{n}/manifest.json", 100),
    "manifest gone": lambda s, n, k: (s / f"manifests/{n}/manifest.json").unlink(),
    "table empty": lambda s, n, k: os.truncate(s / f"manifests/{n}/checksums.bin", 0),
    "shard gone": lambda s, n, k: (s / f"slots/{k}/b/c/0").resolve().unlink(),
    "shard cut": lambda s, n, k: os.truncate((s / f"slots/{k}/d/c/0").resolve(), 9),
    "link gone": lambda s, n, k: (s / f"slots/{k}/c/c/0").unlink(),
    "metadata gone": lambda s, n, k: (s / f"slots/{k}/a/zarr.json").unlink(),
}


class Transactions(RuleBasedStateMachine):
    """``self.listed`` is what has to be there: the step of every retained generation.

    ``self.damaged`` are those of them that cannot be opened any more, ``self.highest`` is the
    number of the last commit: none may have it again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.stack.enter_context(small_chunks())
        self.path = self.stack.enter_context(memory_folder()) / "store"
        self.seeds = itertools.count(1)
        self.listed: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.highest = 1
        self.readers: list[tuple[StoreReader, int]] = []
        self.writer: StoreWriter | None = None

    @initialize()
    def create(self) -> None:
        seed = next(self.seeds)
        make_store(self.path, seed=seed, records=RECORDS, slots=2)
        self.listed = {1: seed}

    @property
    def whole(self) -> list[int]:
        """Numbers of the generations that can be opened."""
        return [number for number in self.listed if number not in self.damaged]

    @precondition(lambda self: self.writer is None)
    @rule(slots=st.integers(1, 4))
    def open(self, slots: int) -> None:
        newest = max(self.listed)
        if newest in self.damaged:
            with pytest.raises(CorruptionError) as caught:
                open_writer(self.path)
            assert ("--generation" in str(caught.value)) == (len(self.listed) > 1)
            return
        self.writer = open_writer(self.path)
        self.writer.ensure_slots(slots)
        assert self.writer.manifest.generation == newest

    @precondition(lambda self: self.writer is None and self.whole)
    @rule(data=st.data(), slots=st.integers(1, 4))
    def roll_back(self, data: st.DataObject, slots: int) -> None:
        number = data.draw(st.sampled_from([None, *self.whole]))
        if number is None:
            number = max(self.whole)
            self.writer = open_newest_whole(self.path)
        else:
            self.writer = open_writer(self.path, generation=number)
        self._make_newest(number)
        self.writer.ensure_slots(slots)

    def _make_newest(self, number: int) -> None:
        assert self.writer is not None
        generation = self.writer.make_newest()
        again = number != max(self.listed)
        seed = self.listed[number]
        self.listed = {n: s for n, s in self.listed.items() if n in self.whole and n != number}
        self.damaged = set()
        if again:
            self.highest += 1
            assert (generation.number, generation.parent) == (self.highest, number)
        else:
            assert generation.number == number
        self.listed[generation.number] = seed

    @precondition(lambda self: self.writer is None and self.whole)
    @rule(keep=st.integers(1, 3))
    def prune(self, keep: int) -> None:
        with open_newest_whole(self.path) as self.writer:
            self._make_newest(max(self.whole))
            self.writer.drop_generations(keep=keep)
            self.listed = dict(sorted(self.listed.items())[-keep:])
            self.writer.drop_free_slots(keep=1)
            read = {reader.generation.slot for reader, _ in self.readers}
            assert len(self.writer.slots) <= len(self.listed) + len(read) + 1
        self.writer = None

    @precondition(lambda self: self.writer is None and len(self.whole) > 1)
    @rule(data=st.data(), kind=st.sampled_from(sorted(DAMAGE)))
    def damage(self, data: st.DataObject, kind: str) -> None:
        """Only what nobody reads: a reader of what is damaged reads damage."""
        number = data.draw(st.sampled_from(self.whole))
        slot = read_root(self.path).find(number).slot
        if all(reader.generation.slot != slot for reader, _ in self.readers):
            DAMAGE[kind](self.path, number, slot)
            self.damaged.add(number)

    @precondition(lambda self: self.writer is not None)
    @rule()
    def close(self) -> None:
        assert self.writer is not None
        self.writer.close()
        self.writer = None

    @precondition(lambda self: self.writer is not None and self.writer.working is None)
    @rule()
    def begin_and_write_half(self) -> None:
        """The half that is written is overwritten by a commit, or is garbage after a close."""
        assert self.writer is not None
        try:
            slot = self.writer.begin(wait_s=0)
        except (RefusedError, LockedError):
            return
        record = self.writer.records["a"]
        self.writer.write(slot, "a", 0, memoryview(content(record, 999)))

    @precondition(lambda self: self.writer is not None)
    @rule(retain=st.sampled_from([1, 1, 1, 2, 3]))
    def commit(self, retain: int) -> None:
        assert self.writer is not None
        seed = next(self.seeds)
        try:
            generation = fill(self.writer, seed, retain=retain)
        except LockedError:
            assert self.readers
            return
        except RefusedError:
            assert len(self.writer.slots) <= len(self.listed)
            return
        self.highest += 1
        assert generation.number == self.highest
        self.listed = {n: s for n, s in self.listed.items() if n in self.whole}
        self.listed[generation.number] = seed
        self.listed = dict(sorted(self.listed.items())[-retain:])
        self.damaged = set()

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([None, *self.listed]))
        if (number or max(self.listed)) in self.damaged:
            with pytest.raises(CorruptionError):
                open_reader(self.path, generation=number)
            return
        expected = self.listed[number or max(self.listed)]
        self.readers.append((open_reader(self.path, generation=number), expected))

    @precondition(lambda self: self.readers)
    @rule()
    def end_reading(self) -> None:
        reader, _ = self.readers.pop(0)
        reader.close()

    @rule(number=st.integers(1, 20))
    def a_dropped_generation_is_refused(self, number: int) -> None:
        if number not in self.listed:
            with pytest.raises(RefusedError, match=f"no generation {number}"):
                open_reader(self.path, generation=number)

    @invariant()
    def every_reader_still_reads_its_generation(self) -> None:
        for reader, seed in self.readers:
            assert_state(reader, seed)

    @invariant()
    def every_listed_generation_is_whole_or_known_to_be_damaged(self) -> None:
        if not self.listed:  # before it is made
            return
        assert [g.number for g in read_root(self.path).generations] == sorted(self.listed)
        for number in self.whole:
            with open_reader(self.path, generation=number) as reader:
                assert_state(reader, self.listed[number])

    def teardown(self) -> None:
        for reader, _ in self.readers:
            reader.close()
        if self.writer is not None:
            self.writer.close()
        self.stack.close()


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
