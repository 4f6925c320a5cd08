"""What a store is, for people and programs to look at; reads no tensor bytes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from checkpoint.checked import read_schema
from checkpoint.schema import Ledger, Schema, Tie
from tiering.generations import ROOT, manifests
from tiering.lock import holders_of, lock_holder, named_pids
from tiering.store import StoreReader, open_reader


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLine:
    """One generation that can be opened; ``readers`` are the processes that have it open."""

    generation: int
    parent: int | None
    step: int
    slot: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedLine:
    """One generation that is not listed any more, whose slot is kept by its ``readers``."""

    generation: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLine:
    """One role of a unit: its data type and its bytes."""

    role: str
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLine:
    """One tensor: where it is in its unit, in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLine:
    """One unit with its roles and tensors."""

    unit: str
    trainable: bool
    parameters: int
    roles: tuple[RoleLine, ...]
    tensors: tuple[TensorLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveLine:
    """One drive: what the generation's shards are long, and how much of it takes up room.

    ``share`` is what the drive is meant to hold of all bytes.
    """

    drive: int
    folder: str
    share: float
    files: int
    nbytes: int
    allocated_nbytes: int
    free_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A store at one moment. ``age_s`` is the time since the last commit."""

    path: str
    uuid: str
    model_type: str
    layout: str
    parameters: int
    generation: int
    step: int
    age_s: float
    holder: str | None
    generations: tuple[GenerationLine, ...]
    dropped: tuple[DroppedLine, ...]
    units: tuple[UnitLine, ...]
    ties: tuple[Tie, ...]
    drives: tuple[DriveLine, ...]
    nbytes: int
    files: Mapping[str, str]
    ledger: Ledger

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of one generation for each trainable parameter."""
        return self.nbytes / max(1, self.parameters)


def summarize(store: Path, *, generation: int | None = None) -> Summary:
    """Return what the store at ``store`` is.

    Raises:
        RefusedError: There is no store, or no such generation.
        CorruptionError: Its metadata or shards are not what was committed.
    """
    readers = _readers(store)  # before this is one
    with closing(open_reader(store, generation=generation)) as reader:
        schema = read_schema(reader)
        return Summary(
            path=str(reader.path),
            uuid=reader.root.uuid,
            model_type=schema.model_type,
            layout=str(schema.layout),
            parameters=schema.parameters,
            generation=reader.manifest.generation,
            step=reader.manifest.step,
            age_s=_age_s(reader),
            holder=_holder(reader),
            generations=tuple(_generations(reader, readers)),
            dropped=tuple(_dropped(reader, readers)),
            units=tuple(_units(schema)),
            ties=schema.ties,
            drives=tuple(_drives(reader)),
            nbytes=sum(record.nbytes for record in reader.records.values()),
            files=schema.files,
            ledger=schema.ledger,
        )


def _holder(reader: StoreReader) -> str | None:
    """Return who writes the store, also if somebody removed the lock file or writes a copy."""
    labelled = sorted({pid for drive in reader.drives for pid in holders_of(drive.label)})
    return lock_holder(reader.path / "LOCK") or (named_pids(labelled) if labelled else None)


def _age_s(reader: StoreReader) -> float:
    """Return the time since the root was replaced, which is the commit."""
    return max(0.0, time.time() - (reader.path / ROOT).stat().st_mtime)


def _readers(store: Path) -> Mapping[int, tuple[int, ...]]:
    """Return the processes that hold each generation, listed or not."""
    paths = manifests(store) if (store / "manifests").is_dir() else []
    return {int(path.parent.name): tuple(holders_of(path)) for path in paths}


def _generations(
    reader: StoreReader, readers: Mapping[int, tuple[int, ...]]
) -> Iterator[GenerationLine]:
    for item in reader.root.generations:
        yield GenerationLine(
            generation=item.number,
            parent=item.parent,
            step=item.step,
            slot=item.slot,
            readers=readers.get(item.number, ()),
        )


def _dropped(reader: StoreReader, readers: Mapping[int, tuple[int, ...]]) -> Iterator[DroppedLine]:
    for number, pids in readers.items():
        if pids and reader.root.find(number) is None:
            yield DroppedLine(generation=number, readers=pids)


def _units(schema: Schema) -> Iterator[UnitLine]:
    for unit in schema.units:
        records = {role: schema.record(unit, role) for role in schema.roles(unit)}
        yield UnitLine(
            unit=unit.name,
            trainable=unit.trainable,
            parameters=unit.parameters,
            roles=tuple(
                RoleLine(role=str(role), dtype=record.dtype, nbytes=record.nbytes)
                for role, record in records.items()
            ),
            tensors=tuple(
                TensorLine(name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset)
                for t in unit.tensors
            ),
        )


def _drives(reader: StoreReader) -> Iterator[DriveLine]:
    files: Counter[int] = Counter()
    lengths: Counter[int] = Counter()
    allocated: Counter[int] = Counter()
    shards = {(chunk.drive, chunk.path) for name in reader.records for chunk in reader.chunks(name)}
    for number, path in shards:
        status = path.stat()
        files[number] += 1
        lengths[number] += status.st_size
        allocated[number] += status.st_blocks * 512
    for drive in reader.drives:
        yield DriveLine(
            drive=drive.number,
            folder=str(drive.folder),
            share=drive.share,
            files=files[drive.number],
            nbytes=lengths[drive.number],
            allocated_nbytes=allocated[drive.number],
            free_nbytes=drive.free_nbytes(),
        )
