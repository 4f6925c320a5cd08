"""The run file: what may stand in it, read strictly, and what a change of it means."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
)

from megatrain import runfile
from megatrain.lr_schedule import Schedule
from tiering.errors import UsageError
from tiering.records import DEFAULT_CODEC

_SIZE_UNITS: Mapping[str, int] = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_LIMITS = ("train.device", "train.max_skipped", "train.any_family", "train.stall_warning")
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_size(value: object) -> object:
    """Return bytes for "8GiB", "1.5GB" and the like; ints and unknown types pass unchanged."""
    if not isinstance(value, str):
        return value
    units = {name.lower(): factor for name, factor in _SIZE_UNITS.items()}
    return int(_quantity(value, units, "write a size like 8GiB or 256MiB"))


def parse_duration(value: object) -> object:
    """Return seconds for "30min", "90s", "1.5h"; numbers are seconds already."""
    if not isinstance(value, str):
        return value
    return float(_quantity(value, _SECONDS, "write a time like 90s, 30min or 2h"))


def _quantity(text: str, units: Mapping[str, int], hint: str) -> Decimal:
    match = _QUANTITY.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not understood; {hint}")
    return Decimal(match[1]) * factor


def _path(value: object) -> object:
    """Make a path absolute now: a run is resumed from other folders too."""
    if isinstance(value, Path) or (isinstance(value, str) and value.strip()):
        return Path(os.path.abspath(os.path.expanduser(value)))
    raise ValueError(f"{value!r} is not a path")


def _number(value: object) -> object:
    """Accept 1e-5 however it was quoted: YAML 1.1 reads it as a word."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def _off(value: object) -> object:
    """Take back what YAML 1.1 makes of a plain ``off``."""
    return "off" if value is False else value


Size = Annotated[PositiveInt, BeforeValidator(parse_size)]
SizeOrZero = Annotated[NonNegativeInt, BeforeValidator(parse_size)]
Seconds = Annotated[float, Field(gt=0), BeforeValidator(parse_duration)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(_number)]
Beta = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number)]
Location = Annotated[Path, BeforeValidator(_path)]


_Run = TypeVar("_Run", bound="RunConfig")


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class DataConfig(_Section):
    """What is learned."""

    train: Location
    """JSONL; each line an object with ``text``, ``messages`` or ``input_ids``."""
    max_seq_len: int = Field(default=1024, ge=2)
    """Tokens; longer samples are cut."""
    shuffle: bool = True
    """A new order each epoch, a function of seed, epoch and data alone."""
    skip_bad_lines: bool = False
    """Leave out lines that cannot be used, and count them, instead of refusing the file."""


class TrainConfig(_Section):
    """How it is learned; nearly everything here decides numbers."""

    steps: PositiveInt = 100
    """Optimizer updates; also the horizon of the learning rate."""
    micro_batch: PositiveInt = 2
    """Samples of one forward and backward pass."""
    accumulate: PositiveInt = 4
    """Micro-batches of one update."""
    seed: int = Field(default=0, ge=0)
    lr: NonNegative = 1e-5
    """Highest learning rate, reached after the warm-up."""
    schedule: Schedule = "cosine"
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: NonNegative = 0.0
    no_decay: tuple[str, ...] = Field(default=("*.bias", "*norm*", "*ln_*"), strict=False)
    """Shell patterns of parameter names that never decay."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), strict=False)
    eps: Annotated[float, Field(gt=0), BeforeValidator(_number)] = 1e-8
    max_grad_norm: NonNegative | None = 1.0
    """Global norm to which gradients are clipped; null or 0 turns clipping off."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of computation; masters are float32 always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    loss_chunk: PositiveInt = 128
    """Tokens whose logits exist at a time."""
    any_family: bool = False
    """Try a model family that no parity test proves."""
    max_skipped: int = Field(default=20, ge=0)
    """Steps in a row without a finite gradient or a target before the run gives up."""
    stall_warning: Seconds = 60.0
    """Seconds after which an operation that has not ended is named in the log."""

    @field_validator("max_grad_norm")
    @classmethod
    def _zero_is_off(cls, value: float | None) -> float | None:
        return value or None

    @property
    def samples_per_step(self) -> int:
        """The global batch."""
        return self.micro_batch * self.accumulate

    def decays(self, name: str) -> bool:
        """Say whether weight decay applies to the parameter ``name``."""
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.no_decay)


class MemoryConfig(_Section):
    """What host memory the run may have; never changes a number."""

    ram: Size = 8 << 30
    """Bytes for records, slabs, gradients, activations and, on a CPU, the device's buffers.

    The interpreter, its libraries and the temporaries of a layer's computation come on top.
    """
    resident: Literal["auto"] | SizeOrZero = "auto"
    """Cap for the records that are kept in RAM; 0 keeps none."""
    slab: Literal["auto"] | Size = "auto"
    """Bytes of one staging slab."""
    workspace: Literal["auto"] | Size = "auto"
    """What the computation takes beside the arenas; auto: measured on a few layers beforehand."""
    gradients: Literal["auto", "ram", "disk"] = "auto"
    lock: Annotated[Literal["auto", "required", "off"], BeforeValidator(_off)] = "auto"
    """Whether host memory is locked, so that it cannot be swapped out; auto: as far as one may."""
    cxl: SizeOrZero = 0
    """Bytes of CXL memory for the weights that are streamed."""
    cxl_nodes: Literal["auto"] | Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = "auto"
    """NUMA nodes of that memory; auto: those without processors."""


class StoreConfig(_Section):
    """Where the state lies and when it is committed."""

    drives: tuple[Location, ...] = Field(default=(), strict=False)
    """Folders to stripe a new store over; default: inside it. A store keeps those it has."""
    layout: Literal["fp32", "split", "split8"] = "fp32"
    tier: Literal["nvme", "zarr"] = "nvme"
    """Of a new store: raw shards that are overwritten in place, or encoded ones, replaced."""
    codec: str = DEFAULT_CODEC
    """Of the zarr tier; ``none`` keeps the bytes as they are, with a checksum."""
    commit_every: Literal["auto"] | PositiveInt = "auto"
    """Steps between commits."""
    max_lost: Seconds = 1800.0
    """Seconds of work that a kill may cost, at most, when ``commit_every`` is auto."""
    retain: PositiveInt = 1
    """Generations kept; each costs a slot."""
    spare_slots: NonNegativeInt = 0
    """More slots, so that training need not wait for whoever reads a dropped generation."""
    reserve: bool = True
    """Allocate all slots before step 1, so that a full disk shows then."""
    verify_reads: Literal["first", "always"] = "first"
    """Compare chunks with their checksums when they are first read, or at every read of a step."""
    io: Literal["auto", "posix", "kvikio"] = "auto"
    """What moves the shards; auto is kvikio where it is installed and finds a GPU."""

    @field_validator("layout")
    @classmethod
    def _built(cls, value: str) -> str:
        if value != "fp32":
            raise ValueError(f"layout {value} is not built yet; use fp32")
        return value

    @field_validator("codec")
    @classmethod
    def _known(cls, value: str) -> str:
        from tiering.codecs import Codec

        try:
            return str(Codec.named(value))
        except UsageError as error:
            raise ValueError(str(error)) from None

    @property
    def slots(self) -> int:
        """Complete places for all records: one for each generation kept, one to write to."""
        return self.retain + 1 + self.spare_slots

    @property
    def codec_in_use(self) -> str | None:
        """The codec of a new store's records; None in the nvme tier."""
        return self.codec if self.tier == "zarr" else None


class RunConfig(_Section):
    """A whole run file."""

    model: Location
    """A store, or a Hugging Face folder that becomes one."""
    out: Location
    """The run's folder: state, metrics and a copy of this configuration."""
    data: DataConfig
    train: TrainConfig = TrainConfig()
    memory: MemoryConfig = MemoryConfig()
    store: StoreConfig = StoreConfig()

    def to_json(self) -> str:
        """Return canonical JSON that :meth:`from_json` turns into an equal configuration."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the configuration that :meth:`to_json` wrote."""
        return _validate(cls, json.loads(text), runfile.Places("stored configuration"))

    def digest(self) -> str:
        """Return a sha256 over the settings that decide numbers; places and budgets are no part."""
        deciding = {key: value for key, value in _flat(self).items() if not _is_harmless(key)}
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def load_run(path: Path, sets: Sequence[str] = ()) -> RunConfig:
    """Return the run file at ``path`` with each ``key=value`` of ``sets`` put over it.

    Raises:
        UsageError: One line for each thing that is wrong, with its place.
    """
    document, places = runfile.read(path)
    return _overridden(document, sets, places)


def with_sets(config: RunConfig, sets: Sequence[str]) -> RunConfig:
    """Return ``config`` with each ``key=value`` of ``sets`` put over it; errors as in load_run."""
    places = runfile.Places("stored configuration")
    return _overridden(json.loads(config.to_json()), sets, places)


def _overridden(document: Any, sets: Sequence[str], places: runfile.Places) -> RunConfig:
    for assignment in sets:
        runfile.put(document, assignment, places)
    return _validate(RunConfig, document, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key with two values; a harmless one leaves the meaning of the run as it was."""

    key: str
    old: Any
    new: Any
    harmless: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def changes(
    old: RunConfig, new: RunConfig, *, old_data: str = "", new_data: str = ""
) -> list[Change]:
    """Return what differs, in the order of the keys.

    ``old_data`` and ``new_data`` are fingerprints: with them the content of the data decides
    whether it is other data, without them its path does.
    """
    before, after = _flat(old), _flat(new)
    if old_data and new_data:
        before["data.train"] += f" (sha256 {old_data[:12]})"
        after["data.train"] += f" (sha256 {new_data[:12]})"
    same_batch = old.train.samples_per_step == new.train.samples_per_step
    harmless_now = {
        "train.micro_batch": same_batch,
        "train.accumulate": same_batch,
        "data.train": bool(old_data) and old_data == new_data,
    }
    return [
        Change(
            key=key,
            old=before[key],
            new=after[key],
            harmless=harmless_now.get(key, _is_harmless(key)),
        )
        for key in before
        if before[key] != after[key]
    ]


def _is_harmless(key: str) -> bool:
    """Say whether a setting decides no number: a place, a budget or a limit."""
    section = key.partition(".")[0]
    if section == "store":
        return key != "store.layout"
    return section in ("out", "memory") or key in _LIMITS


def _flat(config: RunConfig) -> dict[str, Any]:
    """Return plain values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return flat


def known_keys() -> tuple[str, ...]:
    """Return every dotted key of a run file, sections included."""
    keys: list[str] = []
    for name, field in RunConfig.model_fields.items():
        keys.append(name)
        section = field.annotation
        if isinstance(section, type) and issubclass(section, _Section):
            keys += [f"{name}.{inner}" for inner in section.model_fields]
    return tuple(keys)


def _validate(model: type[_Run], document: object, places: runfile.Places) -> _Run:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise UsageError(runfile.explain(error, places, known_keys())) from None
