"""Where every byte of a store belongs, by docs/format.md alone: none of our packages is used."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ITEMSIZE = {"bfloat16": 2, "float32": 4}
ABSENT = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes ``[start, stop)`` of a file that one checksum or one rule vouches for.

    ``elements`` are what they hold, of the record: behind its last one lies padding.
    """

    what: str
    start: int
    stop: int
    elements: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFile:
    """A file or link that retained generations consist of; none is named by what all share.

    ``regions`` are those of a shard; of any other file one digest or rule vouches for all of it.
    """

    path: Path
    kind: str
    generations: frozenset[int] = frozenset()
    drive: int | None = None
    record: str = ""
    tensors: Sequence[Mapping[str, Any]] = field(default=(), hash=False)
    regions: tuple[Region, ...] = ()

    @property
    def unit(self) -> str:
        return self.record.rpartition(".")[0]

    @property
    def role(self) -> str:
        return self.record.rpartition(".")[2]

    def region(self, offset: int) -> Region:
        """Return what vouches for a byte of a shard."""
        return next(r for r in self.regions if r.start <= offset < r.stop)

    def names(self, elements: tuple[int, int] | None = None) -> tuple[str, ...]:
        """Return the tensors of the record, or those that lie in some of its elements."""
        if elements is None:
            return tuple(tensor["name"] for tensor in self.tensors)
        return tuple(t["name"] for t in self.tensors if _overlap(t, *elements))


def _overlap(tensor: Mapping[str, Any], start: int, stop: int) -> bool:
    count = 1
    for size in tensor["shape"]:
        count *= size
    return tensor["offset"] < stop and tensor["offset"] + count > start


def byte_map(store: Path) -> Mapping[Path, StoreFile]:
    """Return every file of the retained generations of an undamaged store, by its path."""
    merged: dict[Path, StoreFile] = {}
    for file in _files(store):
        before = merged.get(file.path)
        generations = file.generations | (before.generations if before else frozenset())
        merged[file.path] = replace(file, generations=generations)
    return merged


def unused_files(store: Path) -> list[Path]:
    """Return the files of a store and its drives that no retained generation consists of."""
    drives = [link.resolve() for link in (store / "drives").iterdir()]
    below = [path for top in (store, *drives) for path in top.rglob("*") if path.is_file()]
    used = byte_map(store)
    return sorted(path for path in set(below) - used.keys() if not path.is_symlink())


def _files(store: Path) -> Iterator[StoreFile]:
    root = _json(store / "zarr.json")["attributes"]["megatrain"]
    yield StoreFile(path=store / "zarr.json", kind="root")
    yield StoreFile(path=store / "slots" / "zarr.json", kind="group")
    for item in root["drives"]:
        link = store / "drives" / str(item["drive"])
        yield StoreFile(path=link, kind="link to a drive", drive=item["drive"])
        yield StoreFile(
            path=_folder(link) / "drive.json", kind="label of a drive", drive=item["drive"]
        )
    schema = store / "schema" / root["schema"]
    yield StoreFile(path=schema.with_suffix(".json"), kind="list of schema files")
    for path in sorted(schema.rglob("*")):
        yield StoreFile(path=path, kind="schema" if path.name == "schema.json" else "side file")
    for generation in root["generations"]:
        yield from _generation(store, generation["generation"], generation["slot"])


def _generation(store: Path, number: int, slot: int) -> Iterator[StoreFile]:
    folder, only = store / "manifests" / str(number), frozenset({number})
    yield StoreFile(path=folder / "manifest.json", kind="manifest", generations=only)
    yield StoreFile(path=folder / "checksums.bin", kind="checksums", generations=only)
    slots = store / "slots" / str(slot)
    yield StoreFile(path=slots / "zarr.json", kind="group", generations=only)
    for name, entry in _json(folder / "manifest.json")["records"].items():
        array = _json(slots / name / "zarr.json")
        about = {
            "generations": only,
            "record": name,
            "tensors": array["attributes"]["tensors"],
        }
        yield StoreFile(path=slots / name / "zarr.json", kind="metadata of an array", **about)
        for shard in range(len(entry["files"])):
            link = slots / name / "c" / str(shard)
            yield StoreFile(path=link, kind="link to a shard", **about)
            drive = int(Path(os.readlink(link)).parts[-2])
            path = _folder(store / "drives" / str(drive)) / Path(os.readlink(link)).name
            kind = "shard" if entry["codec"] is None else "encoded shard"
            regions = tuple(_regions(path, array, entry["codec"], shard))
            yield StoreFile(path=path, kind=kind, drive=drive, regions=regions, **about)


def _folder(link: Path) -> Path:
    """Return the folder that a link to a drive leads to."""
    return Path(os.path.normpath(link.parent / os.readlink(link)))


def _regions(path: Path, array: Any, codec: str | None, shard: int) -> Iterator[Region]:
    sharding = array["codecs"][0]["configuration"]
    per_chunk = sharding["chunk_shape"][0]
    per_shard = array["chunk_grid"]["configuration"]["chunk_shape"][0]
    length, itemsize = array["shape"][0], ITEMSIZE[array["data_type"]]
    places = per_shard // per_chunk
    size = path.stat().st_size
    index = size - 16 * places - 4
    pairs = struct.unpack(f"<{2 * places}Q", path.read_bytes()[index:-4])
    for chunk, (offset, nbytes) in enumerate(zip(pairs[::2], pairs[1::2], strict=True)):
        if offset == ABSENT:
            continue
        first = shard * per_shard + chunk * per_chunk
        last = min(first + per_chunk, length)
        valid = offset + (last - first) * itemsize if codec is None else offset + nbytes
        yield Region(what="chunk", start=offset, stop=valid, elements=(first, last))
        if valid < offset + nbytes:
            yield Region(what="padding", start=valid, stop=offset + nbytes)
    yield Region(what="index", start=index, stop=size)


def _json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
