"""A Hugging Face folder as a source: which files are the weights, and where each tensor is.

Everything here is decided from the index and the headers; tensor bytes are only compared where
two shards hold the same tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoint.formats.files import RangeReader, file_nbytes, parse_object, plain, read_small
from checkpoint.formats.safetensors import (
    PREFIX_NBYTES,
    Header,
    TensorInfo,
    check_start,
    parse_header,
)
from checkpoint.schema import Ignored
from tiering.errors import CorruptionError, RefusedError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
INDEX_MAX_NBYTES = 256 << 20
COMPARE_NBYTES = 1 << 20

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FOREIGN = (*_PICKLES, ".bin.index.json", ".h5", ".msgpack")
_OURS = (".safetensors", ".safetensors.index.json", ".gguf")
_VARIANT_INDEX = re.compile(r".+\.(safetensors|bin)\.index\.[^.]+\.json")


def is_weights(name: str) -> bool:
    """Whether a file of this name holds or lists weights, in whatever format."""
    return name.endswith((*_OURS, *_FOREIGN)) or bool(_VARIANT_INDEX.fullmatch(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The weights of a folder; ``notes`` are what the user must be told about them."""

    folder: Path
    headers: tuple[Header, ...]
    tensors: Mapping[str, TensorInfo]
    ignored: tuple[Ignored, ...] = ()
    notes: tuple[str, ...] = ()

    def path(self, tensor: TensorInfo) -> Path:
        """Return the file that holds ``tensor``."""
        return self.folder / tensor.file

    @property
    def title(self) -> Path:
        """What to call the source in a message: its one file, or the folder."""
        return self.folder / self.headers[0].file if len(self.headers) == 1 else self.folder

    def without(self, names: Iterable[str]) -> Source:
        """Return the source without some tensors."""
        left = set(names)
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n not in left})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The files to read, and what the index says is in them (None without an index)."""

    files: tuple[str, ...]
    index: str = INDEX
    weight_map: Mapping[str, str] | None = None
    total_nbytes: object = None
    notes: tuple[str, ...] = field(default=())


def open_folder(folder: Path, *, weights: str | None = None) -> Source:
    """Return the weights of ``folder``, every header read and compared with its file and the index.

    ``weights`` names the file to follow (one file of weights, or an index) where a folder holds
    more than one set.

    Raises:
        RefusedError: There is no set of weights, or more than one, or the set is not whole.
        CorruptionError: A file is not what its name says, or differs from its header or index.
    """
    if not folder.is_dir():
        raise RefusedError(f"{folder}: no such folder; expected a Hugging Face model folder")
    choice = _choose(folder, weights)
    headers = tuple(read_header(folder, name) for name in choice.files)
    tensors, notes = _merge(folder, headers, choice)
    return Source(
        folder=folder,
        headers=headers,
        tensors=tensors,
        ignored=_ignored(folder, (*choice.files, choice.index)),
        notes=(*choice.notes, *notes),
    )


def read_header(folder: Path, name: str) -> Header:
    """Return the header of one file, checked against the file's length."""
    path = folder / name
    nbytes = file_nbytes(path)
    with RangeReader() as reader:
        start = bytearray(min(nbytes, 512))
        reader.read(path, 0, memoryview(start))
        header = bytearray(check_start(bytes(start), str(path), nbytes))
        reader.read(path, PREFIX_NBYTES, memoryview(header))
    parsed = parse_header(bytes(header), str(path), nbytes)
    if not parsed.tensors:
        raise RefusedError(f"{path}: holds no tensors")
    return _renamed(parsed, name)


def _renamed(header: Header, name: str) -> Header:
    """Return the header with its tensors' file relative to the folder."""
    tensors = tuple(replace(tensor, file=name) for tensor in header.tensors)
    return replace(header, file=name, tensors=tensors)


# Which files


def _choose(folder: Path, weights: str | None) -> _Choice:
    if weights is not None:
        return _named(folder, weights)
    names = {path.name for path in folder.iterdir()}
    if INDEX in names:
        choice = _follow_index(folder, INDEX)
        if SINGLE in names and SINGLE not in choice.files:
            raise RefusedError(
                f"{folder}: two sets of weights: {SINGLE}, and {len(choice.files)} shards listed "
                f"in {INDEX}; name the one to use with --weights, or move the other away"
            )
        return choice
    return _without_index(folder, names)


def _named(folder: Path, name: str) -> _Choice:
    _check_plain(folder, name, "--weights")
    if not (folder / name).exists():
        raise RefusedError(f"{folder / name}: no such file; named with --weights")
    if name.endswith(".json"):
        return _follow_index(folder, name)
    return _Choice(files=(name,))


def _without_index(folder: Path, names: Iterable[str]) -> _Choice:
    names = sorted(names)
    sets = _candidates(names)
    if not sets:
        raise RefusedError(_no_weights(folder, names))
    if len(sets) > 1:
        listed = "; ".join(f"{title} ({len(files)} files)" for title, files in sets.items())
        raise RefusedError(
            f"{folder}: {len(sets)} sets of weights and no {INDEX} to choose one: {listed}; "
            f"name one file with --weights, or move the others away"
        )
    ((title, files),) = sets.items()
    if title == SINGLE:
        return _Choice(files=files)
    _check_whole(folder, title, files)
    note = f"{folder}: no {INDEX}; took the {len(files)} shards that are there"
    return _Choice(files=files, notes=(note,))


def _candidates(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the sets of files that could be the model's weights, by a title for each."""
    sets: dict[str, tuple[str, ...]] = {}
    for name in names:
        if name == SINGLE:
            sets[name] = (name,)
        elif (match := _SHARD.fullmatch(name)) and match["stem"] == "model":
            title = f"model-*-of-{match['total']}.safetensors"
            sets[title] = (*sets.get(title, ()), name)
    return sets


def _check_whole(folder: Path, title: str, files: Sequence[str]) -> None:
    total = int(title[-len("00000.safetensors") :][:5])
    wanted = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    if missing := [name for name in wanted if name not in files]:
        raise RefusedError(
            f"{folder}: no {INDEX}, and {len(missing)} of {total} shards are missing, "
            f"first {missing[0]}"
        )


def _no_weights(folder: Path, names: Sequence[str]) -> str:
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        return (
            f"{folder}: holds no safetensors weights, only PyTorch pickles ({pickles[0]}), which "
            f"are not read: save the model with safe_serialization=True first"
        )
    if others := [name for name in names if name.endswith((".safetensors", ".gguf"))]:
        indexes = (name for name in names if ".safetensors.index." in name and is_weights(name))
        others[:0] = indexes  # one shard alone would not do
        return f"{folder}: no {SINGLE} and no {INDEX}; found {others[0]}; name it with --weights"
    return f"{folder}: holds no weights; expected {SINGLE} or {INDEX}"


def _ignored(folder: Path, used: Sequence[str]) -> tuple[Ignored, ...]:
    reasons = []
    for path in sorted(folder.iterdir()):
        name = path.name
        if name in used or name == INDEX or not is_weights(name):
            continue
        ours = name.endswith(_OURS) or ".safetensors." in name
        reason = "weights that are not part of the set read" if ours else "not safetensors"
        reasons.append(Ignored(name=plain(name), reason=reason))
    return tuple(reasons)


# The index


def _follow_index(folder: Path, name: str) -> _Choice:
    path = folder / name
    document = parse_object(read_small(path, INDEX_MAX_NBYTES), path)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptionError(f"{path}: weight_map must be an object that is not empty")
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CorruptionError(f"{path}: weight_map: {tensor}: expected a file, found {file!r}")
        _check_plain(folder, file, f"{name}: weight_map: {tensor}")
    files = tuple(sorted(set(weight_map.values())))
    _check_present(folder, name, weight_map, files)
    total_nbytes = _total_nbytes(document)
    return _Choice(files=files, index=name, weight_map=weight_map, total_nbytes=total_nbytes)


def _check_plain(folder: Path, name: str, where: str) -> None:
    """Refuse a name that could leave the folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise RefusedError(f"{folder}: {where}: {name!r} is not the plain name of a file")


def _check_present(
    folder: Path, index: str, weight_map: Mapping[str, str], files: Sequence[str]
) -> None:
    missing = [file for file in files if not (folder / file).exists()]
    if not missing:
        return
    lost = [tensor for tensor, file in weight_map.items() if file == missing[0]]
    more = f"; {len(missing) - 1} more shards are missing" if len(missing) > 1 else ""
    raise RefusedError(
        f"{folder / index}: shard {missing[0]} is not there; it held {len(lost)} tensors, "
        f"first {lost[0]}{more}"
    )


def _total_nbytes(document: Mapping[str, Any]) -> object:
    metadata = document.get("metadata")
    return metadata.get("total_size") if isinstance(metadata, dict) else None


# Index against headers


def _merge(
    folder: Path, headers: Sequence[Header], choice: _Choice
) -> tuple[dict[str, TensorInfo], list[str]]:
    """Return where each tensor is, and notes on where that is not what the index says."""
    places: dict[str, list[TensorInfo]] = {}
    for header in headers:
        for tensor in header.tensors:
            places.setdefault(tensor.name, []).append(tensor)
    notes = _repeated(folder, places)
    tensors = {name: copies[0] for name, copies in places.items()}
    if choice.weight_map is not None:
        _check_held(folder / choice.index, choice.weight_map, tensors)
        notes += _misplaced(choice.index, choice.weight_map, places)
        notes += _wrong_total(choice, sum(tensor.nbytes for tensor in tensors.values()))
    return tensors, notes


def _repeated(folder: Path, places: Mapping[str, Sequence[TensorInfo]]) -> list[str]:
    """Refuse a tensor whose copies differ; note the equal ones."""
    notes = []
    with RangeReader() as reader:
        for name, (first, *others) in places.items():
            for other in others:
                if not _same(reader, folder, first, other):
                    raise RefusedError(
                        f"{folder}: tensor {name} is in {first.file} and in {other.file}, "
                        f"and they differ"
                    )
                notes.append(f"{name} is in {first.file} and in {other.file}, with equal bytes")
    return notes


def _same(reader: RangeReader, folder: Path, left: TensorInfo, right: TensorInfo) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return equal_bytes(reader, (folder / left.file, left), (folder / right.file, right))


def equal_bytes(
    reader: RangeReader, left: tuple[Path, TensorInfo], right: tuple[Path, TensorInfo]
) -> bool:
    """Whether two tensors of one length hold equal bytes, compared in bounded memory."""
    nbytes = left[1].nbytes
    for offset in range(0, nbytes, COMPARE_NBYTES):
        length = min(COMPARE_NBYTES, nbytes - offset)
        pieces = [bytearray(length), bytearray(length)]
        for piece, (path, tensor) in zip(pieces, (left, right), strict=True):
            reader.read(path, tensor.start + offset, memoryview(piece))
        if pieces[0] != pieces[1]:
            return False
    return True


def _check_held(
    index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> None:
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        more = f" ({len(lost)} such tensors)" if len(lost) > 1 else ""
        raise RefusedError(
            f"{index}: tensor {lost[0]} should be in {weight_map[lost[0]]}, "
            f"which does not hold it, and neither does any other shard{more}"
        )


def _misplaced(
    index: str, weight_map: Mapping[str, str], places: Mapping[str, Sequence[TensorInfo]]
) -> list[str]:
    notes = []
    for name, copies in places.items():
        files = [copy.file for copy in copies]
        if name not in weight_map:
            notes.append(f"{name} is in {files[0]} but not in {index}; taken from there")
        elif weight_map[name] not in files:
            notes.append(
                f"{name} should be in {weight_map[name]} by {index} but is in {files[0]}; "
                f"taken from there"
            )
    return _shortened(notes, index)


def _shortened(notes: list[str], index: str, limit: int = 3) -> list[str]:
    if len(notes) <= limit:
        return notes
    return [*notes[:limit], f"{len(notes) - limit} more tensors are not where {index} says"]


def _wrong_total(choice: _Choice, nbytes: int) -> list[str]:
    total = choice.total_nbytes
    if total is None or total == nbytes:
        return []
    return [f"{choice.index} gives total_size {total}, the tensors have {nbytes} B; went by them"]
