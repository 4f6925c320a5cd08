"""The slots of a store that is open for writing: which are complete, needed, held or free."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering import lock
from tiering.drive import Drive
from tiering.errors import CorruptionError, LockedError, RefusedError, StorageError
from tiering.generations import manifest_path, reap
from tiering.manifest import Generation, digest, plain_lengths
from tiering.recordio import RecordFiles
from tiering.records import Record
from tiering.slots import (
    Locations,
    Places,
    create_slot,
    delete_slot,
    existing_slots,
    finish_slot,
    is_present,
    locate,
    read_metadata,
    settle_slot,
)
from tiering.tails import wrong_tail

_log = logging.getLogger(__name__)

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a slot is made of: its records, their metadata files, the drive of each shard."""

    records: Mapping[str, Record]
    documents: Mapping[str, bytes]
    places: Places

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of every metadata file, by its path below the slot."""
        return {name: digest(data) for name, data in self.documents.items()}


class SlotTable:
    """Every slot of one store, for its one writer. Not thread-safe.

    A slot is *needed* while the durable root lists a generation in it, *held* while somebody reads
    a dropped generation in it, else free: its content means nothing. A free slot is *ready* if it
    is complete and has the form of the next commit.

    Attributes:
        form: What a slot is made of from now on.
    """

    def __init__(
        self, store: Path, files: RecordFiles, drives: Sequence[Drive], form: Form
    ) -> None:
        self.form = form
        self._store = store
        self._files = files
        self._drives = drives
        self._complete: set[int] = set()
        self._listed: Mapping[int, int] = {}
        self._held: Mapping[Path, int] = {}

    @property
    def complete(self) -> frozenset[int]:
        """The slots whose files are all there."""
        return frozenset(self._complete)

    @property
    def ready(self) -> frozenset[int]:
        """The complete slots, needed or not, that have the form of the next commit."""
        files, records = self._files, self.form.records
        return frozenset(slot for slot in self._complete if files.records(slot) == records)

    @property
    def protected(self) -> frozenset[int]:
        """The slots that may not change: needed ones and held ones."""
        return frozenset({*self._listed.values(), *self._held.values()})

    # -- what the store says -----------------------------------------------------------------------

    def update(self, listed: Iterable[Generation]) -> None:
        """Learn which generations the durable root lists; drop the manifests of all others.

        A slot can be named by several manifests, listed or held: it is free when none is left.
        """
        self._listed = {generation.number: generation.slot for generation in listed}
        self._held = reap(self._store, self._listed)

    def add(self, slot: int, records: Mapping[str, Record], locations: Locations) -> None:
        """Take in a slot that was found complete."""
        self._files.attach(slot, records, locations)
        self._complete.add(slot)

    def find(self) -> None:
        """Take in the other slots on the drives; a damaged one is left to be made anew."""
        for slot in set(existing_slots(self._store)) - self._complete:
            try:
                read_metadata(self._store, slot, self.form.digests)
                settle_slot(self._store, slot)
                self._add_located(slot, whole=True)
            except (CorruptionError, StorageError) as error:  # nothing in it is needed
                if slot not in self.protected:
                    _log.warning(
                        "slot %d of %s is incomplete and unused: %s", slot, self._store, error
                    )

    def _add_located(self, slot: int, *, whole: bool = False) -> None:
        records = self.form.records
        locations = locate(
            self._store,
            slot,
            records=list(records.values()),
            drives=self._drives,
            lengths=plain_lengths(records),
        )
        if whole:
            self._require_tails(locations)
        self.add(slot, records, locations)

    def _require_tails(self, locations: Locations) -> None:
        """Refuse a slot in which a byte differs that no commit writes anew."""
        for record in self.form.records.values():
            shards = locations[record.name] if record.codec is None else ()
            for number, shard in enumerate(shards):
                if wrong := wrong_tail(record, number, shard.path):
                    raise CorruptionError(f"{shard.path} at offset {wrong[0]}: {wrong[1]}")

    # -- making and removing -----------------------------------------------------------------------

    def ensure(self, count: int) -> Sequence[int]:
        """Create slots until there are ``count``; return those that have to be finished.

        What is there of others, damaged or of another form, goes before, for the room.
        """
        for slot in set(existing_slots(self._store)) - self._complete - self.protected:
            self.remove(slot)
        numbers = (n for n in itertools.count() if n not in self._complete | self.protected)
        missing = list(itertools.islice(numbers, max(0, count - len(self._complete))))
        for slot in missing:
            self.make(slot)
        return missing

    def make(self, slot: int) -> None:
        """Create a free slot anew, all zeros; to be finished after a sync of drives and store."""
        self.remove(slot)
        create_slot(
            self._store,
            slot,
            records=list(self.form.records.values()),
            documents=self.form.documents,
            drives=self._drives,
            places=self.form.places,
        )
        self._add_located(slot)

    def present(self) -> frozenset[str]:
        """Return the shared records whose files another slot has already; these must not change."""
        form = self.form
        return frozenset(
            name
            for name, record in form.records.items()
            if is_present(record, drives=self._drives, places=form.places)
        )

    def finish(self, slots: Iterable[int]) -> None:
        """Say of slots whose files are durable that they are complete; durable."""
        for slot in slots:
            finish_slot(self._store, slot, documents=self.form.documents)

    def removable(
        self, listed: Iterable[Generation], *, keep: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return which slots are free if only ``listed`` are, but for ``keep`` ready ones.

        Then those that would be free as well if nobody read them.
        """
        needed = {generation.slot for generation in listed}
        numbers = {generation.number for generation in listed}
        others = self._listed.keys() - numbers
        read = {self._listed[n] for n in others if lock.is_held(manifest_path(self._store, n))}
        held = {*self._held.values(), *read} - needed
        free = set(existing_slots(self._store)) - needed - held
        return sorted(free - set(sorted(free & self.ready)[:keep])), sorted(held)

    def remove(self, slot: int) -> None:
        """Remove every file of a free slot."""
        self._files.detach(slot)
        self._complete.discard(slot)
        delete_slot(self._store, slot, drives=self._drives)

    # -- choosing ----------------------------------------------------------------------------------

    @property
    def all_needed(self) -> bool:
        """Whether every slot is needed, and none could be got by waiting for a reader."""
        return self._complete <= self.protected and not self._held

    def unused_number(self) -> int:
        """Return the lowest number that no slot has."""
        used = {*existing_slots(self._store), *self.protected}
        return next(n for n in itertools.count() if n not in used)

    def free(self) -> int | None:
        """Return a free slot, a ready one if there is any, or None."""
        if self._held and not self.ready - self.protected:
            self._held = reap(self._store, self._listed)
        free = {*existing_slots(self._store), *self._complete} - self.protected
        return min(free & self.ready or free, default=None)

    def await_free(self, wait_s: float) -> int:
        """Return a free slot once there is one.

        Raises:
            RefusedError: There are too few slots.
            LockedError: Readers still held the slots after ``wait_s`` seconds.
        """
        deadline, told = time.monotonic() + wait_s, ""
        while (slot := self.free()) is None:
            self._require_held()
            readers = self._readers()
            if time.monotonic() >= deadline:
                raise LockedError(f"{self._store}: every free slot is being read by {readers}")
            if readers != told:
                _log.warning("%s: waiting for a slot that is read by %s", self._store, readers)
                told = readers
            time.sleep(_POLL_S)
        return slot

    def _require_held(self) -> None:
        if not self._held:
            raise RefusedError(
                f"{self._store}: {len(self._complete)} slots and {len(self._listed)} retained "
                "generations leave none to write to; fit_slots(retain + 1) first"
            )

    def _readers(self) -> str:
        pids = sorted({pid for path in self._held for pid in lock.holders_of(path)})
        return lock.named_pids(pids)
