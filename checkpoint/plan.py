"""What a conversion will do, decided from headers, the index and config.json before any write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.codec import EXACT_IN_FLOAT32
from checkpoint.formats.files import (
    BOM,
    RangeReader,
    file_nbytes,
    parse_object,
    plain,
    read_small,
    stands_for,
)
from checkpoint.formats.hf import CONFIG, Source, equal_bytes, is_weights, open_folder
from checkpoint.formats.safetensors import TensorInfo
from checkpoint.matching import Match, check_shapes, match_names
from checkpoint.names import Expected, expected_model
from checkpoint.scales import FP8, SUFFIX, Scale, block_size, pair_scales
from checkpoint.schema import (
    RECORD_DTYPE,
    SCHEMA_FILE,
    Ignored,
    Layout,
    Ledger,
    Schema,
    SourceFile,
    Tie,
    Unit,
    carried_name,
    pack,
)
from tiering.errors import RefusedError

SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md")
SIDE_NAMES = ("LICENSE", "NOTICE", "merges.txt", "vocab.bpe")
SIDE_MAX_NBYTES = 64 << 20
QUANTIZATION = "quantization_config"
TIE_FLAG = "tie_word_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A conversion: the schema of the store, and the source of each of its tensors.

    ``scales`` belong to the FP8 ones. Both go by the names in the schema.
    """

    source: Source
    schema: Schema
    origin: Mapping[str, TensorInfo]
    scales: Mapping[str, Scale]
    side_files: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the source that will be read."""
        return sum(tensor.nbytes for tensor in self.origin.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What was ignored, renamed, tied or changed: one line each."""
        ledger = self.schema.ledger
        return (*ledger.notes, *(f"ignored {item.name}: {item.reason}" for item in ledger.ignored))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ties:
    """The model as it will be stored, after looking at what its file says about tied tensors."""

    config: dict[str, Any]
    expected: Expected
    match: Match
    ties: tuple[Tie, ...]
    ignored: tuple[Ignored, ...] = ()
    notes: tuple[str, ...] = ()


def plan_conversion(
    folder: Path, *, layout: Layout, weights: str | None = None, tie: bool = False
) -> Plan:
    """Return what converting ``folder`` means; only tensors that may be tied are read.

    ``weights`` names the file to follow in a folder with more than one set. ``tie`` drops the
    bytes of a tied tensor that differs from its target, which otherwise is kept and untied.

    Raises:
        RefusedError: The folder cannot be converted without loss or guessing.
    """
    found = open_folder(folder, weights=weights)
    config = _read_config(folder)
    scales = pair_scales(found.tensors, block_size(config, folder / CONFIG), found.path)
    source = found.without(scale.tensor.name for scale in scales.values())
    plain = {key: value for key, value in config.items() if key != QUANTIZATION}
    tied = _resolve_ties(source, plain, tie=tie)
    origin = _origins(source, tied)
    _check_dtypes(source, tied, origin)
    side_files, left = _side_files(folder, {header.file for header in source.headers})
    edits = _edit_config(side_files, config, tied.config)
    bom = tuple(_strip_marks(side_files))
    ledger = Ledger(
        sources=tuple(
            SourceFile(name=header.file, tensors=len(header.tensors), nbytes=header.nbytes)
            for header in source.headers
        ),
        ignored=(*source.ignored, *tied.ignored, *left),
        notes=(
            *(*source.notes, *tied.match.notes, *tied.notes),
            *(*_scale_notes(scales), *edits, *bom),
        ),
        stripped=tied.match.stripped,
        added=tied.match.added,
    )
    schema = Schema(
        layout=layout,
        units=(*_trainable_units(tied.expected, origin), *_carried_units(tied.match, origin)),
        model_type=tied.expected.model_type,
        ties=tied.ties,
        files={name: hashlib.sha256(data).hexdigest() for name, data in side_files.items()},
        ledger=ledger,
    )
    return Plan(
        source=source,
        schema=schema,
        origin=origin,
        scales={name: scales[o.name] for name, o in origin.items() if o.name in scales},
        side_files=side_files,
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.exists() and not path.is_symlink():
        raise RefusedError(f"{folder}: no {CONFIG}; expected a Hugging Face model folder")
    return parse_object(read_small(path, SIDE_MAX_NBYTES), path)


def _scale_notes(scales: Mapping[str, Scale]) -> list[str]:
    if not scales:
        return []
    first = min(scales)
    return [
        f"{len(scales)} FP8 tensors, first {first}, are dequantised with their {SUFFIX} tensors "
        f"and leave as BF16"
    ]


# Ties


def _resolve_ties(source: Source, config: dict[str, Any], *, tie: bool) -> _Ties:
    where = str(source.folder / CONFIG)
    expected = expected_model(config, where)
    match = _match(expected, source)
    different = _different_aliases(source, expected, match)
    if different:
        return (_tie_anyway if tie else _untie)(source, config, expected, match, different)
    ties = _ties(expected, match)
    notes = tuple(
        f"{item.alias} equals {item.target} in every bit: stored once"
        for item in ties
        if item.in_source
    )
    return _Ties(config=config, expected=expected, match=match, ties=ties, notes=notes)


def _ties(expected: Expected, match: Match, dropped: Sequence[str] = ()) -> tuple[Tie, ...]:
    return tuple(
        Tie(
            alias=alias,
            target=target,
            in_source=alias in match.aliases and alias not in dropped,
        )
        for alias, target in expected.aliases.items()
    )


def _match(expected: Expected, source: Source) -> Match:
    match = match_names(expected, source.tensors, str(source.title))
    shapes = {parameter.name: parameter.shape for parameter in expected.parameters}
    shapes |= expected.buffers
    shapes |= {alias: shapes[expected.aliases[alias]] for alias in match.aliases}
    names = {**match.parameters, **match.aliases, **match.carried}
    found = {name: source.tensors[names[name]] for name in shapes}
    check_shapes(shapes, {name: (str(source.path(t)), t.shape) for name, t in found.items()})
    return match


def _different_aliases(source: Source, expected: Expected, match: Match) -> list[str]:
    """Return the tied names whose bytes in the source are not those of their target."""
    different = []
    with RangeReader() as reader:
        for alias, name in match.aliases.items():
            left = source.tensors[name]
            right = source.tensors[match.parameters[expected.aliases[alias]]]
            if left.dtype != right.dtype or not equal_bytes(
                reader, (source.path(left), left), (source.path(right), right)
            ):
                different.append(alias)
    return different


def _untie(
    source: Source,
    config: dict[str, Any],
    expected: Expected,
    match: Match,
    different: list[str],
) -> _Ties:
    """Keep tied tensors that differ as parameters of their own."""
    untied = config | {TIE_FLAG: False}
    now = expected_model(untied, str(source.folder / CONFIG))
    pairs = " and ".join(f"{alias} and {expected.aliases[alias]}" for alias in different)
    if still := [alias for alias in different if alias in now.aliases]:
        raise RefusedError(
            f"{source.path(source.tensors[match.aliases[still[0]]])}: {pairs} are tied by the "
            f"model but differ, and {TIE_FLAG}: false does not untie them"
        )
    note = (
        f"{pairs} differ although {CONFIG} ties them: both are kept, "
        f"and {TIE_FLAG} is false from here on"
    )
    match = _match(now, source)
    ties = _ties(now, match)
    return _Ties(config=untied, expected=now, match=match, ties=ties, notes=(note,))


def _tie_anyway(
    source: Source,
    config: dict[str, Any],
    expected: Expected,
    match: Match,
    different: list[str],
) -> _Ties:
    """Keep only the target of tied tensors that differ, as the user asked for."""
    ties = _ties(expected, match, different)
    ignored = tuple(
        Ignored(
            name=source.tensors[match.aliases[alias]].name,
            reason=f"differs from {expected.aliases[alias]}, to which it was tied by request",
        )
        for alias in different
    )
    return _Ties(config=config, expected=expected, match=match, ties=ties, ignored=ignored)


# Tensors


def _origins(source: Source, tied: _Ties) -> dict[str, TensorInfo]:
    names = {**tied.match.parameters, **tied.match.carried}
    return {name: source.tensors[original] for name, original in names.items()}


def _check_dtypes(source: Source, tied: _Ties, origin: Mapping[str, TensorInfo]) -> None:
    for name in tied.match.parameters:
        if (info := origin[name]).dtype not in (*EXACT_IN_FLOAT32, *FP8):
            raise RefusedError(
                f"{source.path(info)}: parameter {info.name} is {info.dtype}; a parameter must be "
                f"one of {', '.join(EXACT_IN_FLOAT32)}, which a float32 master holds exactly"
            )
    for name in tied.match.carried:
        if (info := origin[name]).dtype not in RECORD_DTYPE:
            raise RefusedError(
                f"{source.path(info)}: tensor {info.name} is {info.dtype}, which a store "
                f"cannot hold"
            )


def _trainable_units(expected: Expected, origin: Mapping[str, TensorInfo]) -> Iterator[Unit]:
    units: dict[str, list[str]] = {}
    for parameter in expected.parameters:
        units.setdefault(parameter.unit, []).append(parameter.name)
    for unit, names in units.items():
        yield pack(unit, ((name, origin[name].shape, origin[name].dtype) for name in names))


def _carried_units(match: Match, origin: Mapping[str, TensorInfo]) -> Iterator[Unit]:
    units: dict[str, list[str]] = {}
    for name in match.carried:
        units.setdefault(origin[name].dtype, []).append(name)
    for dtype, names in units.items():
        tensors = ((name, origin[name].shape, dtype) for name in names)
        yield pack(carried_name(dtype), tensors, trainable=False)


# Side files


def _side_files(folder: Path, weights: set[str]) -> tuple[dict[str, bytes], list[Ignored]]:
    """Return the content of the files that travel with the weights, and what else lies there."""
    files: dict[str, bytes] = {}
    left: list[Ignored] = []
    for path in sorted(folder.iterdir()):
        name = path.name
        if name in weights or is_weights(name) or name.startswith("."):
            continue
        if not name.endswith(SIDE_SUFFIXES) and name not in SIDE_NAMES:
            left.append(Ignored(name=plain(name), reason="not a kind of file that a model needs"))
        elif name == SCHEMA_FILE or not name.isprintable():
            left.append(Ignored(name=plain(name), reason="a store has no place for this name"))
        elif path.exists() and not path.is_file():
            left.append(Ignored(name=plain(name), reason="not a regular file"))
        elif file_nbytes(path) > SIDE_MAX_NBYTES:
            left.append(Ignored(name=plain(name), reason=f"larger than {SIDE_MAX_NBYTES} B"))
        else:
            files[name] = _read_side_file(path)
    return files, left


def _read_side_file(path: Path) -> bytes:
    """Return the content of a file that travels along; without the real one none of it helps."""
    data = read_small(path, SIDE_MAX_NBYTES)
    if kind := stands_for(data):
        raise RefusedError(f"{path}: not a file of the model: {kind}")
    return data


def _edit_config(
    side_files: dict[str, bytes], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """Rewrite config.json if the model that is stored is not quite the one it describes."""
    if before == after:
        return []
    side_files[CONFIG] = (json.dumps(after, indent=2, ensure_ascii=False) + "\n").encode()
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [f"{CONFIG}: changed {', '.join(changed)}"]


def _strip_marks(side_files: dict[str, bytes]) -> Iterator[str]:
    for name, data in side_files.items():
        if name.endswith(".json") and data.startswith(BOM):
            side_files[name] = data[len(BOM) :]
            yield f"{name}: byte-order mark removed"
