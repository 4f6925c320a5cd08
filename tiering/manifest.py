"""The root and the manifests as values, and their exact bytes. Pure: no I/O, no clock."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tiering.checksum import Table
from tiering.codecs import Codec, encoded_bounds, shard_spec
from tiering.errors import CorruptionError, RefusedError
from tiering.fields import Fields, parse
from tiering.records import ITEMSIZE, NAME, NBYTES_MOST, SHARD_NBYTES_MOST, Record

FORMAT = 1
ATTRIBUTE = "megatrain"
DIGEST = re.compile(r"[0-9a-f]{64}")
_CODECS = {str(codec): codec for codec in Codec}
_UUID = re.compile(r"[0-9a-f]{32}")
_NUMBER_MOST = (1 << 31) - 1  # of slots and drives
CHUNKS_MOST = 1 << 26  # of a generation: what is read whole has its limit, and so have checksums


class NoStoreError(RefusedError):
    """A Zarr group that does not say that it is a store."""


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
        pointer["check"] = check_of(pointer)
        group = {"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTE: pointer}}
        return encode_json(group)

    @classmethod
    def decode(cls, data: bytes, source: Path) -> Root:
        """Return the root that ``data``, the content of ``source``, encodes."""
        group = Fields(parse(data, source), source, "")
        if group.value("node_type") != "group" or group.value("zarr_format") != 3:
            raise CorruptionError(f"{source}: not the zarr.json of a Zarr v3 group", file=source)
        attributes = group.value("attributes")
        if not isinstance(attributes, dict) or ATTRIBUTE not in attributes:
            raise NoStoreError(f"{source}: a Zarr group, but no store: no {ATTRIBUTE!r} attribute")
        pointer = attributes[ATTRIBUTE]
        fields = Fields(pointer, source, f"attributes.{ATTRIBUTE}")
        try:
            fields.check_format(FORMAT)
        except RefusedError as error:  # the check is the same in every format
            if pointer.get("check") == check_of(pointer):
                raise
            raise CorruptionError(f"{error}; or it is damaged", file=source) from error
        root = cls(
            uuid=fields.pattern("uuid", _UUID),
            drives=_drives(fields),
            schema=fields.pattern("schema", DIGEST),
            generations=tuple(_generation(g) for g in fields.items("generations")),
        )
        _check_pointer(fields, root)
        fields.equal("check", check_of(pointer), "the sha256 of the rest")
        fields.finish()
        return root


def check_of(pointer: Mapping[str, Any]) -> str:
    """Return what makes a flipped bit of a root or label show: nothing else vouches for it."""
    rest = {key: value for key, value in pointer.items() if key != "check"}
    return digest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def _drives(fields: Fields) -> dict[int, float]:
    pairs = [_drive(item) for item in fields.items("drives")]
    numbers = [number for number, _ in pairs]
    if not numbers or numbers != sorted(set(numbers)):
        raise fields.error("drives", numbers, "ascending numbers, at least one")
    if not any(share for _, share in pairs):
        raise fields.error("drives", pairs, "a share above 0 in at least one")
    return dict(pairs)


def _drive(fields: Fields) -> tuple[int, float]:
    drive = fields.integer("drive", 0, _NUMBER_MOST), fields.fraction("share")
    fields.finish()
    return drive


def _generation(fields: Fields) -> Generation:
    generation = Generation(
        number=fields.integer("generation", 1),
        parent=fields.optional_integer("parent", 1),
        slot=fields.integer("slot", 0, _NUMBER_MOST),
        step=fields.integer("step", 0),
        digest=fields.pattern("sha256", DIGEST),
    )
    _check_parent(fields, generation.number, generation.parent)
    fields.finish()
    return generation


def _check_parent(fields: Fields, number: int, parent: int | None) -> None:
    if parent is not None and parent >= number:
        raise fields.error("parent", parent, f"a number below {number}")


def _check_pointer(fields: Fields, root: Root) -> None:
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
        fields.equal(key, value, f"{value!r} as in the last of generations")


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

    @property
    def table_nbytes(self) -> int:
        """The length of ``checksums.bin``."""
        return 4 * sum(entry.count for entry in self.records.values())

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
        fields = Fields(parse(data, source), source, "")
        fields.check_format(FORMAT)
        manifest = cls(
            uuid=fields.pattern("uuid", _UUID),
            generation=fields.integer("generation", 1),
            parent=fields.optional_integer("parent", 1),
            slot=fields.integer("slot", 0, _NUMBER_MOST),
            step=fields.integer("step", 0),
            records={name: _entry(e) for name, e in fields.named("records")},
            metadata=fields.patterns("metadata", DIGEST),
            table_digest=fields.pattern("table", DIGEST),
            train_state=fields.mapping("train_state"),
        )
        _check_parent(fields, manifest.generation, manifest.parent)
        fields.finish()
        _check_entries(manifest, fields)
        return manifest


def _entry(fields: Fields) -> Entry:
    entry = Entry(
        dtype=fields.member("dtype", ITEMSIZE),
        length=fields.integer("length", 1),
        shared=fields.boolean("shared"),
        codec=fields.optional_member("codec", _CODECS),
        shard_nbytes=fields.integer("shard_nbytes", 1, SHARD_NBYTES_MOST),
        first=fields.integer("first", 0),
        count=fields.integer("count", 1),
        files=fields.integers("files"),
    )
    if entry.length * ITEMSIZE[entry.dtype] > NBYTES_MOST:
        raise fields.error("length", entry.length, f"at most {NBYTES_MOST} B of elements")
    fields.finish()
    return entry


def _check_entries(manifest: Manifest, fields: Fields) -> None:
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
        first += entry.count
        if first > CHUNKS_MOST:
            raise fields.error(f"records.{name}.count", first, f"{CHUNKS_MOST} chunks at most")
        _check_files(name, entry, record, fields)


def _check_files(name: str, entry: Entry, record: Record, fields: Fields) -> None:
    count = record.geometry.shard_count
    if len(entry.files) != count:
        raise fields.error(f"records.{name}.files", entry.files, f"{count} lengths")
    expected = file_lengths(record)
    if expected is not None:
        if entry.files != expected:
            raise fields.error(f"records.{name}.files", entry.files, expected)
        return
    for shard, nbytes in enumerate(entry.files):
        low, high = encoded_bounds(shard_spec(record, shard))
        if not low <= nbytes <= high:
            raise fields.error(f"records.{name}.files[{shard}]", nbytes, f"from {low} to {high}")


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
            f"{manifest.table_digest}",
            file=source,
        )
    expected = manifest.table_nbytes
    if len(data) != expected:
        raise CorruptionError(f"{source}: {len(data)} B, expected {expected} B", file=source)
    return np.frombuffer(data, "<u4").astype(np.uint32)
