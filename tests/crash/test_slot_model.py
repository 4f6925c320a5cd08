"""The slots as states: every order of kills, power cuts and readers in a model of them, and some
in the real store beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.power_cut import History, Recording, materialise
from tests.support.slot_model import Broken, Listed, Model, Rules, State, explore
from tests.support.tiering_stores import (
    assert_state,
    fill,
    make_store,
    memory_folder,
    small_chunks,
    small_record,
)
from tiering import fsops
from tiering.errors import LockedError, RefusedError
from tiering.store import StoreReader, StoreWriter, open_reader, open_writer


@pytest.mark.parametrize(
    "model",
    [
        Model(slots=2, retain=1, readers=2),
        Model(slots=3, retain=1, spare=1, readers=2),
        Model(slots=3, retain=2),
        Model(slots=4, retain=2, spare=1),
    ],
    ids=lambda m: f"{m.slots} slots, {m.retain} retained, {m.spare} spare, {m.readers} readers",
)
def test_no_order_of_events_loses_or_mixes_a_generation(
    model: Model, record_property: Callable[[str, object], None]
) -> None:
    states = explore(model)
    record_property("states", states)
    assert states > 1000


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize(
    ("rule", "broken"),
    {
        "slots_of_readers_are_kept": "is being read, its slot holds",
        "readers_look_again": "is being read, its slot holds",
        "bytes_before_names": "is listed, its slot holds None",
        "names_before_freeing": "the root is not durable|manifest is gone",
        "opening_syncs": "the root is not durable",
        "a_failed_step_stops": "is listed, its slot holds None",
    }.items(),
)
def test_every_rule_is_needed(slots: int, rule: str, broken: str) -> None:
    with pytest.raises(Broken, match=broken):
        explore(Model(slots=slots, retain=slots - 1, rules=Rules(**{rule: False})))


@pytest.mark.parametrize(
    ("slots", "retain", "spare"), [(1, 1, 0), (2, 2, 0), (3, 3, 0), (2, 1, 1), (3, 2, 1)]
)
def test_fewer_slots_than_retained_and_spare_and_one_are_too_few(
    slots: int, retain: int, spare: int
) -> None:
    with pytest.raises(Broken, match="there is no slot to write to"):
        explore(Model(slots=slots, retain=retain, spare=spare))


# -- the real store ------------------------------------------------------------------------------

RECORDS = (small_record("a", "float32", 5),)


class Killed(BaseException):
    """Ends an action where a kill would."""


class Beside:
    """A store, and the state of the model that it has to be in."""

    def __init__(self, folder: Path, model: Model) -> None:
        self.model = model
        self.folder = folder
        self.store = folder / "store"
        self.state = model.start()
        self.readers: list[StoreReader] = []
        self.stack = ExitStack()
        self._record()
        self.writer: StoreWriter | None = open_writer(self.store)

    def _record(self) -> None:
        self.stack.close()
        self.recording = self.stack.enter_context(Recording(self.folder).running())

    def close(self) -> None:
        self._kill()
        self._stop_readers()
        self.stack.close()

    def _kill(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def _stop_readers(self) -> None:
        while self.readers:
            self.readers.pop().close()

    def _follow(self, *events: str) -> None:
        """Take the model through the events that begin like these."""
        for event in events:
            self.state = next(
                then for name, then in self.model.next(self.state) if name.startswith(event)
            )

    # -- what may happen ---------------------------------------------------------------------------

    def commit(self) -> None:
        self._commit_until(None, "committed")

    def commit_killed_after_sync(self) -> None:
        self._commit_until("create folder", "kill", done=False)

    def commit_killed_after_rename(self) -> None:
        self._commit_until("fsync folder", "kill")

    def _commit_until(self, action: str | None, last: str, *, done: bool = True) -> None:
        assert self.writer is not None
        renamed = action != "fsync folder"

        def kill(found: str, path: Path) -> None:
            nonlocal renamed
            renamed = renamed or found == "rename"
            if found == action and renamed:
                raise Killed

        slot = self._begin()
        if slot is None:
            return
        step = self.state.step + 1
        with fsops.observed(kill), suppress(Killed):
            fill(self.writer, step, retain=self.model.retain)
            assert action is None
        rename = ("rename",) if done else ()
        self._follow(f"write slot {slot}", "step done", "sync", *rename, last)
        if last == "kill":
            self._kill()

    def _begin(self) -> int | None:
        assert self.writer is not None
        possible = self.model.outputs(self.model.reaped(self.state))
        try:
            slot = self.writer.begin(wait_s=0)
        except LockedError:
            assert not possible
            assert self.readers
            return None
        except RefusedError:
            assert not possible
            return None
        assert slot in possible
        return slot

    def half_a_step_and_kill(self) -> None:
        slot = self._begin()
        if slot is not None:
            assert self.writer is not None
            self.writer.write(slot, "a", 0, memoryview(b"x" * 20))
            self._follow(f"write slot {slot}", "kill")
            self._kill()

    def open(self) -> None:
        self.writer = open_writer(self.store)
        self._follow("open")

    def roll_back(self) -> None:
        assert self.writer is not None
        number = self.state.visible[0].number
        self._kill()
        self.writer = open_writer(self.store, generation=number)
        self.writer.make_newest()
        self._follow("kill", "open", f"roll back to {number}", "committed")

    def prune(self) -> None:
        assert self.writer is not None
        self.writer.drop_generations(keep=1)
        self._follow("prune to 1", "committed")

    def read_newest(self) -> None:
        self._read(self.state.visible[-1])

    def read_oldest(self) -> None:
        self._read(self.state.visible[0])

    def _read(self, listed: Listed) -> None:
        self.readers.append(open_reader(self.store, generation=listed.number))
        self._follow(*(f"{event} {listed}" for event in ("look up", "open", "lock", "read")))

    def stop_reading(self) -> None:
        self._follow(f"stop reading {self.state.readers[0].of}")
        reader = next(r for r in self.readers if not self._is_read(r.generation.number))
        self.readers.remove(reader)
        reader.close()

    def _is_read(self, number: int) -> bool:
        return any(reader.of.number == number for reader in self.state.readers)

    def cut_losing_all(self) -> None:
        self._cut(self.state.durable, lost=True)

    def cut_losing_nothing(self) -> None:
        self._cut(self.state.visible, lost=False)

    def _cut(self, root: tuple[Listed, ...], *, lost: bool) -> None:
        self._kill()
        self._stop_readers()
        history = History(self.recording)
        durable = zip(history.effects, history.durable_from(), strict=True)
        kept = [(e, None) for e, time in durable if not lost or time <= history.end]
        materialise(history.tree(kept), self.folder)
        self._record()
        slots = sorted(self.state.unsynced) if lost else []
        self._follow(f"power cut, root {root[-1].number}, lost slots {slots}")

    # -- what has to be true -----------------------------------------------------------------------

    def check(self) -> None:
        """Check that the store lists what the model lists, all of it whole, and is read so."""
        for listed in self.state.visible:
            with open_reader(self.store, generation=listed.number) as reader:
                assert_state(reader, listed.step)
                generations = reader.root.generations
        found = tuple(Listed(g.number, g.slot, g.step) for g in generations)
        assert found == self.state.visible
        for reader in self.readers:
            assert_state(reader, reader.generation.step)


EVENTS: Mapping[str, Callable[[State], bool]] = {
    "commit": lambda s: s.phase == "idle",
    "commit_killed_after_sync": lambda s: s.phase == "idle",
    "commit_killed_after_rename": lambda s: s.phase == "idle",
    "half_a_step_and_kill": lambda s: s.phase == "idle",
    "open": lambda s: s.phase == "dead",
    "roll_back": lambda s: s.phase == "idle" and len(s.visible) > 1,
    "prune": lambda s: s.phase == "idle" and len(s.visible) > 1,
    "read_newest": lambda s: len(s.readers) < 1,
    "read_oldest": lambda s: len(s.readers) < 1 and len(s.visible) > 1,
    "stop_reading": lambda s: bool(s.readers),
    "cut_losing_all": lambda s: bool(s.unsynced) or s.durable != s.visible,
    "cut_losing_nothing": lambda s: s.durable != s.visible,
}


class Walks:
    """Walks through a store and the model of it, each from the same beginning."""

    def __init__(self, folder: Path, model: Model) -> None:
        self.folder = folder
        self.model = model
        make_store(folder / "store", records=RECORDS, seed=0, slots=model.slots)
        self.begin = History(Recording(folder)).visible()

    def everywhere(self, depth: int) -> int:
        """Do all that can be done in up to ``depth`` events; return how many states there are."""
        seen = {self.model.start()}
        ways: list[tuple[State, tuple[str, ...]]] = [(self.model.start(), ())]
        for _ in range(depth):
            longer = []
            for (state, way), event in itertools.product(ways, EVENTS):
                if EVENTS[event](state):
                    then = self.walk((*way, event))
                    if then not in seen:
                        seen.add(then)
                        longer.append((then, (*way, event)))
            ways = longer
        return len(seen)

    def walk(self, way: tuple[str, ...]) -> State:
        """Do all this, check the store, and return the state that it is in."""
        materialise(self.begin, self.folder)
        beside = Beside(self.folder, self.model)
        try:
            for event in way:
                getattr(beside, event)()
            beside.check()
            return beside.state
        except Exception as error:
            raise AssertionError(f"after {', '.join(way)}: {error}") from error
        finally:
            beside.close()


@pytest.mark.parametrize(("slots", "retain", "depth"), [(2, 1, 4), (3, 2, 3)])
def test_the_store_does_what_the_model_does(slots: int, retain: int, depth: int) -> None:
    model = Model(slots=slots, retain=retain, any_slot=True, steps=100, commits=100)
    with small_chunks(), memory_folder() as folder:
        assert Walks(folder, model).everywhere(depth) > 30
