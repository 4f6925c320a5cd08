"""What a store holds: units, roles, tensors and where each tensor lies. Pure; no I/O."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tiering.errors import CorruptionError
from tiering.fields import Fields, parse, plain
from tiering.manifest import DIGEST
from tiering.records import Record, round_up

FORMAT = 1
SCHEMA_FILE = "schema.json"
RANK_MOST = 32  # dimensions; what numpy and torch can have
OFFSET_MULTIPLE = 64  # elements; every tensor starts at one, so slices of any role are aligned

OUTER_IN = "outer_in"
OUTER_OUT = "outer_out"
LAYER_PREFIX = "layer."
CARRIED_PREFIX = "carried."

RECORD_DTYPE: Mapping[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
}
"""The data type of a record for each spelling of safetensors that a store can hold."""


class Role(StrEnum):
    """What the bytes of a record mean to training."""

    WEIGHTS = "weights"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


class Layout(StrEnum):
    """Which roles a trainable unit has, and in which data types."""

    FP32 = "fp32"
    """bf16 weights, fp32 master, fp32 moments: 14 bytes a parameter."""
    FLOAT32 = "float32"
    """fp32 master, which is also the weights, and fp32 moments: 12 bytes a parameter."""


MOMENTS = (Role.EXP_AVG, Role.EXP_AVG_SQ)
TRAINABLE_ROLES: Mapping[Layout, tuple[Role, ...]] = {
    Layout.FP32: (Role.WEIGHTS, Role.MASTER, *MOMENTS),
    Layout.FLOAT32: (Role.MASTER, *MOMENTS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One named tensor inside a unit; ``dtype`` is that of its source, in safetensors' spelling.

    ``offset`` counts elements from the start of the record and is the same in every role.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    def __post_init__(self) -> None:
        if self.offset % OFFSET_MULTIPLE or self.offset < 0 or min(self.shape, default=1) < 0:
            raise ValueError(f"tensor {self.name}: shape {self.shape} at offset {self.offset}")
        if len(self.shape) > RANK_MOST:
            raise ValueError(f"tensor {self.name}: {len(self.shape)} dimensions are too many")

    @property
    def length(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Offset of the element after the last one."""
        return self.offset + self.length

    def as_attributes(self) -> dict[str, Any]:
        """Return what the array's metadata says about this tensor."""
        shape = list(self.shape)
        return {"name": self.name, "shape": shape, "dtype": self.dtype, "offset": self.offset}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Tensors that are streamed as a whole; they do not overlap, and the gaps are zero."""

    name: str
    tensors: tuple[Tensor, ...]
    trainable: bool = True

    def __post_init__(self) -> None:
        end = 0
        for tensor in self.tensors:
            if tensor.offset < end:
                raise ValueError(f"unit {self.name}: {tensor.name} overlaps what precedes it")
            end = tensor.end
        if not self.trainable and len({tensor.dtype for tensor in self.tensors}) != 1:
            raise ValueError(f"unit {self.name}: untrained tensors of one data type go together")

    @property
    def length(self) -> int:
        """Elements of each of the unit's records, gaps included."""
        end = self.tensors[-1].end if self.tensors else 0
        return max(OFFSET_MULTIPLE, round_up(end, OFFSET_MULTIPLE))

    @property
    def parameters(self) -> int:
        """Elements that belong to tensors."""
        return sum(tensor.length for tensor in self.tensors)

    @property
    def is_layer(self) -> bool:
        """Whether this is one decoder layer."""
        return self.name.startswith(LAYER_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """``alias`` is another name of the parameter ``target``.

    ``in_source`` says that the source held its bytes a second time under this name.
    """

    alias: str
    target: str
    in_source: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of weights that a conversion read: how many tensors and data bytes it held."""

    name: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A file or a tensor of the source that is not in the store, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where everything in a store came from, and what was left behind or changed on the way.

    ``stripped`` and ``added`` are what every source name lost and gained at its front.
    """

    sources: tuple[SourceFile, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    notes: tuple[str, ...] = ()
    stripped: str = ""
    added: str = ""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Everything about a store that never changes while it is trained.

    ``files`` maps the name of each side file (configuration, tokenizer) to its sha256.
    """

    layout: Layout
    units: tuple[Unit, ...]
    model_type: str
    ties: tuple[Tie, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        names = [tensor.name for unit in self.units for tensor in unit.tensors]
        names += [tie.alias for tie in self.ties]
        if len(set(names)) != len(names):
            raise ValueError(f"tensor {_first_repeated(names)} is there twice")
        if missing := [tie.target for tie in self.ties if tie.target not in self._places]:
            raise ValueError(f"tie to {missing[0]}, which is in no unit")

    @cached_property
    def _units(self) -> Mapping[str, Unit]:
        return {unit.name: unit for unit in self.units}

    @cached_property
    def _places(self) -> Mapping[str, tuple[Unit, Tensor]]:
        return {tensor.name: (unit, tensor) for unit in self.units for tensor in unit.tensors}

    @cached_property
    def _targets(self) -> Mapping[str, str]:
        return {tie.alias: tie.target for tie in self.ties}

    @property
    def layers(self) -> tuple[Unit, ...]:
        """The decoder layers in the order in which they run."""
        return tuple(unit for unit in self.units if unit.is_layer)

    @property
    def parameters(self) -> int:
        """Number of trainable parameters; a tied one counts once."""
        return sum(unit.parameters for unit in self.units if unit.trainable)

    def unit(self, name: str) -> Unit:
        """Return the unit of that name; KeyError if there is none."""
        return self._units[name]

    def find(self, name: str) -> tuple[Unit, Tensor]:
        """Return the place of a tensor, seen through ties; KeyError if there is none."""
        return self._places[self._targets.get(name, name)]

    def roles(self, unit: Unit) -> tuple[Role, ...]:
        """Return the roles that ``unit`` is stored in."""
        return TRAINABLE_ROLES[self.layout] if unit.trainable else (Role.WEIGHTS,)

    def record(self, unit: Unit, role: Role | str) -> Record:
        """Return the record of one role of ``unit``."""
        return Record(
            name=record_name(unit.name, role),
            dtype=self._dtype(unit, Role(role)),
            length=unit.length,
            shared=not unit.trainable,
            attributes={
                "unit": unit.name,
                "role": str(role),
                "tensors": [tensor.as_attributes() for tensor in unit.tensors],
            },
        )

    def records(self) -> tuple[Record, ...]:
        """Return every record, unit by unit."""
        return tuple(self.record(unit, role) for unit in self.units for role in self.roles(unit))

    def _dtype(self, unit: Unit, role: Role) -> str:
        if role not in self.roles(unit):
            raise KeyError(f"{unit.name} has no {role}")
        if not unit.trainable:
            return RECORD_DTYPE[unit.tensors[0].dtype]
        return "bfloat16" if role is Role.WEIGHTS else "float32"

    def encode(self) -> bytes:
        """Return the content of ``schema.json``; equal schemas give equal bytes."""
        document = {
            "format": FORMAT,
            "layout": str(self.layout),
            "model_type": self.model_type,
            "units": [_encode_unit(unit) for unit in self.units],
            "ties": [_encode_flat(tie) for tie in self.ties],
            "files": dict(sorted(self.files.items())),
            "ledger": _encode_ledger(self.ledger),
        }
        return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the schema that ``encode`` wrote.

        Raises:
            CorruptionError: A field is missing, unknown or of the wrong type.
            RefusedError: It is of a newer format.
        """
        source = Path(SCHEMA_FILE)
        top = Fields(parse(data, source), source, "")
        top.check_format(FORMAT)
        try:
            schema = cls(
                layout=Layout(top.member("layout", list(Layout))),
                model_type=top.text("model_type"),
                units=tuple(_decode_unit(item) for item in top.items("units")),
                ties=tuple(_decode_tie(item) for item in top.items("ties")),
                files=top.patterns("files", DIGEST),
                ledger=_decode_ledger(top.child("ledger")),
            )
            schema.records()  # their names and lengths are possible ones
        except ValueError as error:
            raise CorruptionError(f"{SCHEMA_FILE}: {plain(str(error))}") from error
        top.finish()
        return schema


def record_name(unit: str, role: Role | str) -> str:
    """Return the name of the record that holds ``role`` of the unit named ``unit``."""
    return f"{unit}.{role}"


def layer_name(index: int) -> str:
    """Return the name of the unit of decoder layer ``index``."""
    return f"{LAYER_PREFIX}{index:03d}"


def carried_name(dtype: str) -> str:
    """Return the name of the unit of untrained tensors of one source data type."""
    return f"{CARRIED_PREFIX}{dtype}"


def pack(
    name: str, tensors: Iterable[tuple[str, tuple[int, ...], str]], *, trainable: bool = True
) -> Unit:
    """Return a unit with the given (name, shape, dtype) in their order, each at the next offset."""
    placed: list[Tensor] = []
    offset = 0
    for tensor_name, shape, dtype in tensors:
        placed.append(Tensor(name=tensor_name, shape=shape, dtype=dtype, offset=offset))
        offset = round_up(placed[-1].end, OFFSET_MULTIPLE)
    return Unit(name=name, tensors=tuple(placed), trainable=trainable)


def _first_repeated(names: Iterable[str]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)


def _encode_unit(unit: Unit) -> dict[str, Any]:
    tensors = [tensor.as_attributes() for tensor in unit.tensors]
    return {"name": unit.name, "trainable": unit.trainable, "tensors": tensors}


def _encode_flat(item: Tie | SourceFile | Ignored) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__dataclass_fields__}


def _encode_ledger(ledger: Ledger) -> dict[str, Any]:
    return {
        "sources": [_encode_flat(source) for source in ledger.sources],
        "ignored": [_encode_flat(ignored) for ignored in ledger.ignored],
        "notes": list(ledger.notes),
        "stripped": ledger.stripped,
        "added": ledger.added,
    }


def _decode_unit(item: Fields) -> Unit:
    unit = Unit(
        name=item.text("name"),
        trainable=item.boolean("trainable"),
        tensors=tuple(_decode_tensor(tensor) for tensor in item.items("tensors")),
    )
    item.finish()
    return unit


def _decode_tensor(item: Fields) -> Tensor:
    tensor = Tensor(
        name=item.text("name"),
        shape=item.integers("shape"),
        dtype=item.member("dtype", RECORD_DTYPE),
        offset=item.integer("offset", 0),
    )
    item.finish()
    return tensor


def _decode_tie(item: Fields) -> Tie:
    alias, target, in_source = item.text("alias"), item.text("target"), item.boolean("in_source")
    item.finish()
    return Tie(alias=alias, target=target, in_source=in_source)


def _decode_ledger(item: Fields) -> Ledger:
    ledger = Ledger(
        sources=tuple(_decode_source(source) for source in item.items("sources")),
        ignored=tuple(_decode_ignored(ignored) for ignored in item.items("ignored")),
        notes=item.texts("notes"),
        stripped=item.text("stripped"),
        added=item.text("added"),
    )
    item.finish()
    return ledger


def _decode_source(item: Fields) -> SourceFile:
    source = SourceFile(
        name=item.text("name"),
        tensors=item.integer("tensors", 0),
        nbytes=item.integer("nbytes", 0),
    )
    item.finish()
    return source


def _decode_ignored(item: Fields) -> Ignored:
    name, reason = item.text("name"), item.text("reason")
    item.finish()
    return Ignored(name=name, reason=reason)
