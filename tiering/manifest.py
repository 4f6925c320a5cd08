"""The root and the manifests as values, and their exact bytes. Pure: no I/O, no clock."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tiering.checksum import Table
from tiering.codecs import Codec, encoded_bounds, shard_spec
from tiering.errors import CorruptionError, RefusedError
from tiering.records import ITEMSIZE, NAME, Record

FORMAT = 1
ATTRIBUTE = "megatrain"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CODECS = {str(codec): codec for codec in Codec}
_UUID = re.compile(r"[0-9a-f]{32}")


def digest(data: bytes | memoryview) -> str:
    """Return the sha256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def encode_json(document: Any) -> bytes:
    """Return ``document`` as UTF-8 JSON; equal documents give equal bytes."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One commit as the root names it; ``digest`` is the sha256 of its manifest."""

    number: int
    parent: int | None
    slot: int
    step: int
    digest: str

    @property
    def folder(self) -> str:
        """Folder of the manifest and its table, relative to the store."""
        return f"manifests/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """The pointer: which generations exist, the last of them the current one.

    ``drives`` maps the number of each drive to its share of the bytes of new shards.
    """

    uuid: str
    drives: Mapping[int, float]
    schema: str
    generations: tuple[Generation, ...]

    @property
    def latest(self) -> Generation:
        """The current generation."""
        return self.generations[-1]

    def find(self, number: int) -> Generation | None:
        """Return the listed generation ``number``."""
        return next((g for g in self.generations if g.number == number), None)

    def encode(self) -> bytes:
        """Return the root group's ``zarr.json``."""
        pointer = {
            "format": FORMAT,
            "uuid": self.uuid,
            "generation": self.latest.number,
            "slot": self.latest.slot,
            "step": self.latest.step,
            "manifest": f"{self.latest.folder}/manifest.json",
            "sha256": self.latest.digest,
            "drives": [{"drive": n, "share": share} for n, share in self.drives.items()],
            "schema": self.schema,
            "generations": [
                {
                    "generation": g.number,
                    "parent": g.parent,
                    "slot": g.slot,
                    "step": g.step,
                    "sha256": g.digest,
                }
                for g in self.generations
            ],
        }
        group = {"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTE: pointer}}
        return encode_json(group)

    @classmethod
    def decode(cls, data: bytes, source: Path) -> Root:
        """Return the root that ``data``, the content of ``source``, encodes."""
        group = _Fields(_parse(data, source), source, "")
        if group.value("node_type") != "group" or group.value("zarr_format") != 3:
            raise CorruptionError(f"{source}: not the zarr.json of a Zarr v3 group")
        attributes = group.value("attributes")
        if not isinstance(attributes, dict) or ATTRIBUTE not in attributes:
            raise RefusedError(f"{source}: a Zarr group, but no store: no {ATTRIBUTE!r} attribute")
        fields = _Fields(attributes[ATTRIBUTE], source, f"attributes.{ATTRIBUTE}")
        _check_format(fields)
        root = cls(
            uuid=fields.pattern("uuid", _UUID),
            drives=_drives(fields),
            schema=fields.pattern("schema", _DIGEST),
            generations=tuple(_generation(g) for g in fields.items("generations")),
        )
        _check_pointer(fields, root)
        fields.finish()
        return root


def _drives(fields: _Fields) -> dict[int, float]:
    pairs = [_drive(item) for item in fields.items("drives")]
    numbers = [number for number, _ in pairs]
    if not numbers or numbers != sorted(set(numbers)):
        raise fields.error("drives", numbers, "ascending numbers, at least one")
    if not any(share for _, share in pairs):
        raise fields.error("drives", pairs, "a share above 0 in at least one")
    return dict(pairs)


def _drive(fields: _Fields) -> tuple[int, float]:
    drive = fields.integer("drive", 0), fields.fraction("share")
    fields.finish()
    return drive


def _generation(fields: _Fields) -> Generation:
    generation = Generation(
        number=fields.integer("generation", 1),
        parent=fields.optional_integer("parent", 1),
        slot=fields.integer("slot", 0),
        step=fields.integer("step", 0),
        digest=fields.pattern("sha256", _DIGEST),
    )
    fields.finish()
    return generation


def _check_pointer(fields: _Fields, root: Root) -> None:
    numbers = [g.number for g in root.generations]
    if not numbers or numbers != sorted(set(numbers)):
        raise fields.error("generations", numbers, "ascending numbers, at least one")
    last = root.latest
    expected = {
        "generation": last.number,
        "slot": last.slot,
        "step": last.step,
        "manifest": f"{last.folder}/manifest.json",
        "sha256": last.digest,
    }
    for key, value in expected.items():
        fields.equal(key, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a manifest says of one record.

    ``codec`` is null where shards are not encoded. ``first`` and ``count`` select its checksums in
    the table; ``files`` are the exact lengths of its shard files.
    """

    dtype: str
    length: int
    shared: bool
    codec: str | None
    shard_nbytes: int
    first: int
    count: int
    files: tuple[int, ...]

    def record(self, name: str, attributes: Mapping[str, Any] = MappingProxyType({})) -> Record:
        """Return the record of that name which this describes."""
        return Record(
            name=name,
            dtype=self.dtype,
            length=self.length,
            shared=self.shared,
            codec=self.codec,
            shard_nbytes=self.shard_nbytes,
            attributes=attributes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a generation is. ``metadata`` maps paths below the slot to the sha256 of the file."""

    uuid: str
    generation: int
    parent: int | None
    slot: int
    step: int
    records: Mapping[str, Entry]
    metadata: Mapping[str, str]
    table_digest: str
    train_state: Mapping[str, Any]

    def encode(self) -> bytes:
        """Return the bytes of ``manifest.json``."""
        document = {
            "format": FORMAT,
            "uuid": self.uuid,
            "generation": self.generation,
            "parent": self.parent,
            "slot": self.slot,
            "step": self.step,
            "records": {
                name: {
                    "dtype": e.dtype,
                    "length": e.length,
                    "shared": e.shared,
                    "codec": e.codec,
                    "shard_nbytes": e.shard_nbytes,
                    "first": e.first,
                    "count": e.count,
                    "files": list(e.files),
                }
                for name, e in self.records.items()
            },
            "metadata": dict(self.metadata),
            "table": self.table_digest,
            "train_state": dict(self.train_state),
        }
        return encode_json(document)

    @classmethod
    def decode(cls, data: bytes, source: Path) -> Manifest:
        """Return the manifest that ``data``, the content of ``source``, encodes."""
        fields = _Fields(_parse(data, source), source, "")
        _check_format(fields)
        manifest = cls(
            uuid=fields.pattern("uuid", _UUID),
            generation=fields.integer("generation", 1),
            parent=fields.optional_integer("parent", 1),
            slot=fields.integer("slot", 0),
            step=fields.integer("step", 0),
            records={name: _entry(e) for name, e in fields.named("records")},
            metadata={k: str(v) for k, v in fields.mapping("metadata").items()},
            table_digest=fields.pattern("table", _DIGEST),
            train_state=fields.mapping("train_state"),
        )
        fields.finish()
        _check_entries(manifest, fields)
        return manifest


def _entry(fields: _Fields) -> Entry:
    entry = Entry(
        dtype=fields.member("dtype", ITEMSIZE),
        length=fields.integer("length", 1),
        shared=fields.boolean("shared"),
        codec=fields.optional_member("codec", _CODECS),
        shard_nbytes=fields.integer("shard_nbytes", 1),
        first=fields.integer("first", 0),
        count=fields.integer("count", 1),
        files=fields.integers("files"),
    )
    fields.finish()
    return entry


def _check_entries(manifest: Manifest, fields: _Fields) -> None:
    paths = {"zarr.json", *(f"{name}/zarr.json" for name in manifest.records)}
    if manifest.metadata.keys() != paths:
        odd = sorted(manifest.metadata.keys() ^ paths)
        raise fields.error("metadata", odd[0], "exactly one zarr.json per record and one above")
    first = 0
    for name, entry in manifest.records.items():
        if not NAME.fullmatch(name):
            raise fields.error("records", name, f"a name that matches {NAME.pattern}")
        if entry.first != first:
            raise fields.error(f"records.{name}.first", entry.first, first)
        record = entry.record(name)
        if entry.count != record.geometry.chunk_count:
            raise fields.error(f"records.{name}.count", entry.count, record.geometry.chunk_count)
        _check_files(name, entry, record, fields)
        first += entry.count


def _check_files(name: str, entry: Entry, record: Record, fields: _Fields) -> None:
    expected = file_lengths(record)
    if expected is not None:
        if entry.files != expected:
            raise fields.error(f"records.{name}.files", entry.files, expected)
        return
    specs = [shard_spec(record, shard) for shard in range(record.geometry.shard_count)]
    bounds = [encoded_bounds(spec) for spec in specs]
    if len(entry.files) != len(bounds) or not all(
        low <= nbytes <= high for nbytes, (low, high) in zip(entry.files, bounds, strict=True)
    ):
        raise fields.error(f"records.{name}.files", entry.files, f"lengths within {bounds}")


def file_lengths(record: Record) -> tuple[int, ...] | None:
    """Return the length of each shard file of ``record``; None if its content decides."""
    geometry = record.geometry
    if record.codec is not None:
        return None
    return tuple(geometry.file_nbytes(shard) for shard in range(geometry.shard_count))


def plain_lengths(records: Mapping[str, Record]) -> dict[str, tuple[int, ...]]:
    """Return the lengths of the files of every record without a codec."""
    lengths = {name: file_lengths(record) for name, record in records.items()}
    return {name: found for name, found in lengths.items() if found is not None}


def entries(
    records: Sequence[Record], encoded: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> dict[str, Entry]:
    """Return what a manifest says of ``records``, whose checksums follow each other.

    ``encoded`` has the lengths of the shard files of the records that have a codec.
    """
    result = {}
    first = 0
    for record in records:
        count = record.geometry.chunk_count
        result[record.name] = Entry(
            dtype=record.dtype,
            length=record.length,
            shared=record.shared,
            codec=record.codec,
            shard_nbytes=record.shard_nbytes,
            first=first,
            count=count,
            files=file_lengths(record) or encoded[record.name],
        )
        first += count
    return result


def encode_table(tables: Sequence[Table]) -> bytes:
    """Return the bytes of ``checksums.bin``: a little-endian uint32 per chunk."""
    return b"".join(np.ascontiguousarray(table, "<u4").tobytes() for table in tables)


def decode_table(data: bytes, manifest: Manifest, source: Path) -> Table:
    """Return the checksums of a generation, in the order of its records."""
    found = digest(data)
    if found != manifest.table_digest:
        raise CorruptionError(
            f"{source}: sha256 is {found}, generation {manifest.generation} was committed with "
            f"{manifest.table_digest}"
        )
    expected = 4 * sum(entry.count for entry in manifest.records.values())
    if len(data) != expected:
        raise CorruptionError(f"{source}: {len(data)} B, expected {expected} B")
    return np.frombuffer(data, "<u4").astype(np.uint32)


def _check_format(fields: _Fields) -> None:
    number = fields.integer("format", 1)
    if number > FORMAT:
        raise RefusedError(
            f"{fields.source}: written in format {number}, this program reads up to format "
            f"{FORMAT}; use a newer version"
        )


def parse_object(data: bytes, source: Path) -> dict[str, Any]:
    """Return the JSON object that ``data``, the content of ``source``, spells."""
    document = _parse(data, source)
    if not isinstance(document, dict):
        raise CorruptionError(f"{source}: found {type(document).__name__}, expected an object")
    return document


def _parse(data: bytes, source: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) != len(pairs):
            raise CorruptionError(f"{source}: a key appears twice in one object")
        return document

    try:
        return json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{source}: no valid JSON ({error})") from error


class _Fields:
    """Strict reading of one JSON object: every key is asked for once, none is left over."""

    def __init__(self, document: Any, source: Path, where: str) -> None:
        self.source = source
        self._where = where
        if not isinstance(document, dict):
            raise CorruptionError(
                f"{source}: {where or 'document'}: found {type(document).__name__}, "
                "expected an object"
            )
        self._left: dict[str, Any] = dict(document)

    def error(self, key: str, found: object, expected: object) -> CorruptionError:
        name = f"{self._where}.{key}" if self._where else key
        return CorruptionError(f"{self.source}: {name}: found {found!r}, expected {expected}")

    def value(self, key: str) -> Any:
        if key not in self._left:
            raise self.error(key, "nothing", "a value")
        return self._left.pop(key)

    def integer(self, key: str, minimum: int) -> int:
        value = self.value(key)
        if not _is_integer(value) or value < minimum:
            raise self.error(key, value, f"an integer of at least {minimum}")
        return int(value)

    def optional_integer(self, key: str, minimum: int) -> int | None:
        if self._left.get(key, 0) is None:
            del self._left[key]
            return None
        return self.integer(key, minimum)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.value(key)
        if not isinstance(value, list) or not all(map(_is_integer, value)):
            raise self.error(key, value, "a list of integers")
        return tuple(value)

    def fraction(self, key: str) -> float:
        value = self.value(key)
        if not (_is_integer(value) or isinstance(value, float)) or not 0 <= value <= 1:
            raise self.error(key, value, "a number from 0 to 1")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def pattern(self, key: str, pattern: re.Pattern[str]) -> str:
        value = self.value(key)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.error(key, value, f"text that matches {pattern.pattern}")
        return value

    def member(self, key: str, allowed: Mapping[str, Any]) -> str:
        value = self.value(key)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, value, f"one of {', '.join(allowed)}")
        return value

    def optional_member(self, key: str, allowed: Mapping[str, Any]) -> str | None:
        if self._left.get(key, "") is None:
            del self._left[key]
            return None
        return self.member(key, allowed)

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.error(key, value, "an object")
        return value

    def items(self, key: str) -> Iterator[_Fields]:
        value = self.value(key)
        if not isinstance(value, list):
            raise self.error(key, value, "a list")
        for index, item in enumerate(value):
            yield _Fields(item, self.source, f"{key}[{index}]")

    def named(self, key: str) -> Iterator[tuple[str, _Fields]]:
        for name, item in self.mapping(key).items():
            yield name, _Fields(item, self.source, f"{key}.{name}")

    def equal(self, key: str, expected: object) -> None:
        found = self.value(key)
        if found != expected:
            raise self.error(key, found, f"{expected!r} as in the last of generations")

    def finish(self) -> None:
        if self._left:
            raise self.error(next(iter(self._left)), "a key", "no such key")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
