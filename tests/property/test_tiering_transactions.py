"""A store driven at random against a plain dictionary of generations."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

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
from tiering.errors import LockedError, RefusedError
from tiering.store import StoreReader, StoreWriter, open_reader, open_writer

RECORDS = (
    small_record("a", "float32", 4099),
    small_record("b", "bfloat16", 10),
    small_record("c", "float32", 3, shared=True),
    small_record("d", "float32", 8 * 4096 + 5, codec="zstd"),
    small_record("e", "bfloat16", 7, shared=True, codec="none"),
)


class Transactions(RuleBasedStateMachine):
    """``self.listed`` is what has to be there: the step of every retained generation."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.stack.enter_context(small_chunks())
        self.path = self.stack.enter_context(memory_folder()) / "store"
        self.seeds = itertools.count(1)
        self.listed: dict[int, int] = {}
        self.readers: list[tuple[StoreReader, int]] = []
        self.writer: StoreWriter | None = None

    @initialize()
    def create(self) -> None:
        seed = next(self.seeds)
        make_store(self.path, seed=seed, records=RECORDS, slots=2)
        self.listed = {1: seed}

    @precondition(lambda self: self.writer is None)
    @rule(slots=st.integers(1, 4))
    def open(self, slots: int) -> None:
        self.writer = open_writer(self.path)
        self.writer.ensure_slots(slots)
        assert self.writer.manifest.generation == max(self.listed)

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
        self.listed[generation.number] = seed
        self.listed = dict(sorted(self.listed.items())[-retain:])

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([None, *self.listed]))
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
    def every_listed_generation_is_whole(self) -> None:
        for number, seed in self.listed.items():
            with open_reader(self.path, generation=number) as reader:
                assert_state(reader, seed)

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
