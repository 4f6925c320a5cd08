"""Whatever changes a store, recorded, with what a power cut may leave of it.

What is allowed is a set of steps, one of which the current generation is of; None: no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint.recode import Cut, recode
from checkpoint.retention import prune
from tests.support.loops import memory_mount
from tests.support.power_cut import History, Recording, materialise
from tests.support.tiering_stores import (
    assert_state,
    equal_rates,
    fill,
    make_store,
    memory_folder,
    small_chunks,
    small_record,
)
from tiering.attaching import attach_drives
from tiering.errors import RefusedError
from tiering.moving import move_store
from tiering.slots import slot_folder
from tiering.store import StoreWriter, create_store, open_reader, open_writer
from tiering.zarr_documents import shard_index

RECORDS = (
    small_record("a", "float32", 4097),
    small_record("c", "float32", 3, shared=True),
    small_record("d", "float32", 4097, codec="blosc-lz4-bitshuffle"),
)

Allowed = frozenset[Any]


def allowed(*outcomes: Any) -> Allowed:
    return frozenset(outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Something that is done in a folder, and the check of what a power cut leaves of it.

    ``act`` does it, and says from when on which outcome is right. After it was killed it goes on.
    """

    folder: Path
    begin: Allowed
    act: Callable[[Recording], None]
    check: Callable[[Allowed], None]

    def record(self) -> Recording:
        """Do it."""
        recording = Recording(self.folder)
        recording.allow(self.begin)
        with recording.running():
            self.act(recording)
        return recording

    def resume(self, before: Recording, time: int) -> Recording:
        """Kill what was recorded at ``time``, lose nothing by that, and do it again."""
        killed = before.killed(time)
        materialise(History(killed).visible(), self.folder)
        recording = Recording(self.folder, killed)
        with recording.running():
            self.act(recording)
        return recording


@dataclass(slots=True, kw_only=True)
class Workplace:
    """A folder in memory with a place for a store, and file systems mounted in it for drives.

    What is in ``scratch`` is not recorded, and no power cut changes it.
    """

    folder: Path
    drives: Mapping[str, Path]
    scratch: Path
    store: Path = field(init=False)

    def __post_init__(self) -> None:
        self.store = self.folder / "store"

    def make(self, names: str = "pq", *, slots: int = 2) -> None:
        """Make the store, with its generation 1."""
        drives = [self.drives[name] for name in names]
        make_store(self.store, records=RECORDS, drives=drives, slots=slots)

    def make_retained(self, generations: int, *, spare: int = 0) -> None:
        """Make the store with so many generations, and a slot to write to or more."""
        self.make(slots=generations + 1 + spare)
        for seed in range(2, generations + 1):
            with open_writer(self.store) as writer:
                fill(writer, seed, retain=generations)

    # -- what has to be true after a power cut ---------------------------------------------------

    def assert_whole(self, allowed: Allowed) -> list[int]:
        """Check every byte of every listed generation, and return their steps."""
        with open_reader(self.store) as reader:
            assert reader.manifest.step in allowed, f"step {reader.manifest.step}"
            assert_state(reader, reader.manifest.step)
            generations = reader.root.generations
        for generation in generations[:-1]:
            with open_reader(self.store, generation=generation.number) as reader:
                assert_state(reader, generation.step)
        return [generation.step for generation in generations]

    def assert_goes_on(self, retain: int = 1) -> None:
        """Check that another step can be committed, and leaves nothing of what was lost."""
        with open_writer(self.store) as writer:
            writer.ensure_slots(retain + 1)
            fill(writer, 9, retain=retain)
            assert_indexes(writer)
            listed = {str(generation.number) for generation in writer.generations}
        with open_reader(self.store) as reader:
            assert_state(reader, 9)
        assert {path.name for path in (self.store / "manifests").iterdir()} == listed
        assert not (self.store / "CREATING").exists()

    def assert_clean(self, names: str, store: Path | None = None) -> None:
        """Check that exactly these drives have a folder, and that every link has its file."""
        found = {name: list(drive.iterdir()) for name, drive in self.drives.items()}
        assert {name: len(inside) for name, inside in found.items() if inside} == dict.fromkeys(
            names, 1
        ), f"folders on drives: {found}"
        store = store or self.store
        linked = {link.resolve() for link in store.glob("slots/*/*/c/*")}
        files = {
            path for inside in found.values() for folder in inside for path in folder.iterdir()
        }
        assert linked <= files
        assert {link.resolve() for link in (store / "drives").iterdir()} == {
            folder for inside in found.values() for folder in inside
        }

    def _check(self, steps: Allowed) -> None:
        self.assert_whole(steps)
        self.assert_goes_on()

    def _scenario(
        self,
        begin: Allowed,
        act: Callable[[Recording], None],
        check: Callable[[Allowed], None] | None = None,
    ) -> Scenario:
        return Scenario(folder=self.folder, begin=begin, act=act, check=check or self._check)

    # -- what can be done to a store -------------------------------------------------------------

    def commits(self, retain: int, *, spare: int = 0) -> Scenario:
        """Open a store and commit twice."""
        self.make_retained(retain, spare=spare)

        def act(recording: Recording) -> None:
            with open_writer(self.store) as writer:
                step = writer.manifest.step
                recording.allow(allowed(step))
                writer.ensure_slots(retain + 1 + spare)
                for step in (step + 1, step + 2):
                    recording.allow(allowed(step - 1, step))
                    fill(writer, step, retain=retain)
                    recording.allow(allowed(step))

        def check(steps: Allowed) -> None:
            assert len(self.assert_whole(steps)) == retain
            self.assert_goes_on(retain)

        return self._scenario(allowed(retain), act, check)

    def more_slots(self) -> Scenario:
        """Repair a slot, make another and reserve them, then commit to one."""
        self.make(slots=2)
        next(self.drives["p"].glob("*/1.a.0")).unlink()

        def act(recording: Recording) -> None:
            with open_writer(self.store) as writer:
                writer.ensure_slots(3)
                writer.reserve()
                self._commit_second(recording, writer)

        def check(steps: Allowed) -> None:
            self.assert_whole(steps)
            self.assert_goes_on(2)

        return self._scenario(allowed(1), act, check)

    def repair(self) -> Scenario:
        """Commit to a slot that is damaged."""
        self.make()
        next(self.drives["p"].glob("*/1.a.0")).unlink()

        def act(recording: Recording) -> None:
            with open_writer(self.store) as writer:
                if len(writer.slots) < 2:  # killed between its removal and its return
                    writer.ensure_slots(2)
                self._commit_second(recording, writer)

        return self._scenario(allowed(1), act)

    def _commit_second(self, recording: Recording, writer: StoreWriter) -> None:
        if writer.manifest.step == 1:
            recording.allow(allowed(1, 2))
            fill(writer, 2)
        recording.allow(allowed(2))

    def going_back(self) -> Scenario:
        """Make an older generation the newest, and commit after it."""
        self.make_retained(2)

        def act(recording: Recording) -> None:
            with open_reader(self.store) as reader:
                first = 1 if reader.manifest.step == 2 else None
            recording.allow(allowed(1, 2, 3))
            with open_writer(self.store, generation=first) as writer:
                if first:
                    writer.make_newest()
                if writer.manifest.step == 1:
                    recording.allow(allowed(1))
                    recording.allow(allowed(1, 3))
                    fill(writer, 3, retain=2)
                recording.allow(allowed(3))

        def check(steps: Allowed) -> None:
            assert len(self.assert_whole(steps)) == 2
            self.assert_goes_on(2)

        return self._scenario(allowed(2), act, check)

    def pruning(self) -> Scenario:
        """Drop all generations but the newest, and the slots that they had."""
        self.make_retained(3)

        def act(_: Recording) -> None:
            prune(self.store, yes=True)

        def check(steps: Allowed) -> None:
            assert self.assert_whole(steps) in ([1, 2, 3], [3])
            prune(self.store, yes=True)
            assert len(list((self.store / "slots").glob("[0-9]*"))) <= 2
            self.assert_goes_on()

        return self._scenario(allowed(3), act, check)

    def creation(self) -> Scenario:
        """Create a store."""

        def act(recording: Recording) -> None:
            if not (self.store / "zarr.json").exists():
                with self._created() as writer:
                    recording.allow(allowed(None, 1))
                    fill(writer, 1)
                recording.allow(allowed(1))

        return self._scenario(allowed(None), act, self._check_created)

    def creation_given_up(self) -> Scenario:
        """Create a store and leave it without a commit."""

        def act(_: Recording) -> None:
            with self._created():
                pass

        return self._scenario(allowed(None), act, self._check_created)

    def _created(self):  # type: ignore[no-untyped-def]
        return create_store(
            self.store,
            records=RECORDS,
            schema_files={"schema.json": b"{}", "chat/template": b"\xff"},
            drives=[self.drives[name] for name in "pq"],
            slots=2,
            measure=equal_rates,
        )

    def _check_created(self, steps: Allowed) -> None:
        try:
            self.assert_whole(steps)
        except RefusedError as error:
            assert "no store" in str(error)  # noqa: PT017
            assert None in steps, "there is no store any more"
            self.make()
            self.assert_whole(allowed(1))
        else:
            self.assert_goes_on()
        self.assert_clean("pq")

    def recoding(self) -> Scenario:
        """Give records other codecs and shards."""
        self.make()

        def act(_: Recording) -> None:
            recode(self.store, Cut(codec="", records=("d",)))
            recode(self.store, Cut(codec="blosc-zstd-shuffle", shard_nbytes=8192))

        return self._scenario(allowed(1), act)

    def moving(self, begin: str, end: str, *, generations: int = 1) -> Scenario:
        """Move a store with a free slot to other drives."""
        self.make(begin, slots=generations + 1)
        steps = [*range(1, generations + 1)]
        for step in steps[1:]:
            with open_writer(self.store) as writer:
                fill(writer, step, retain=generations)

        def move() -> None:
            folders = [self.drives[name] for name in end]
            move_store(self.store, folders, measure=equal_rates)

        def check(steps: Allowed) -> None:
            assert len(self.assert_whole(steps)) == generations
            move()
            self.assert_clean(end)
            self.assert_goes_on(generations + 1)

        return self._scenario(allowed(generations), lambda _: move(), check)

    def attaching(self) -> Scenario:
        """Rename the folders of the drives and attach them."""
        self.make()
        for drive in self.drives.values():
            for folder in list(drive.iterdir()):
                folder.rename(drive / "renamed")

        def attach() -> None:
            attach_drives(self.store, [self.drives[name] for name in "pq"])

        def act(recording: Recording) -> None:
            attach()
            recording.allow(allowed(1))

        def check(steps: Allowed) -> None:
            if None in steps:
                attach()
            self.assert_whole(steps)
            self.assert_goes_on()

        return self._scenario(allowed(None, 1), act, check)


def assert_indexes(writer: StoreWriter) -> None:
    """Check that every file is a Zarr shard for whoever does not know the geometry."""
    for slot in writer.slots:
        for name, record in writer.records.items():
            for shard in range(record.geometry.shard_count if record.codec is None else 0):
                file = slot_folder(writer.path, slot) / name / "c" / str(shard)
                assert file.read_bytes().endswith(shard_index(record, shard)), f"index of {file}"


@contextmanager
def workplace(drives: str = "pqr") -> Iterator[Workplace]:
    """Lend a place with these drives."""
    with (
        small_chunks(),
        memory_folder() as folder,
        memory_folder() as scratch,
        ExitStack() as stack,
    ):
        mounts = {
            name: stack.enter_context(memory_mount(folder, "tmpfs", name=name)) for name in drives
        }
        yield Workplace(folder=folder, drives=mounts, scratch=scratch)


SCENARIOS: Mapping[str, Callable[[Workplace], Scenario]] = {
    "commits": lambda place: place.commits(1),
    "commits, two retained": lambda place: place.commits(2),
    "commits, a spare slot": lambda place: place.commits(1, spare=1),
    "going back": Workplace.going_back,
    "prune": Workplace.pruning,
    "slots": Workplace.more_slots,
    "repair": Workplace.repair,
    "creation": Workplace.creation,
    "creation given up": Workplace.creation_given_up,
    "recode": Workplace.recoding,
    "move": lambda place: place.moving("pq", "qr"),
    "move, two retained": lambda place: place.moving("pq", "qr", generations=2),
    "move out of the store": lambda place: place.moving("", "pq"),
    "move together": lambda place: place.moving("pqr", "r"),
    "attach": Workplace.attaching,
}
