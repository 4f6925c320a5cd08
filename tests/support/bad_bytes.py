"""Damage to stores, one at a time: when it is found, and whether it is named as what it is."""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from checkpoint.checked import CheckedReader, read_schema
from checkpoint.cli import cli
from checkpoint.convert import convert
from checkpoint.recode import Cut, recode
from checkpoint.schema import Layout
from tests.support.byte_map import StoreFile, byte_map
from tests.support.runs import Quiet, run_config, tiny_llama, token_rows, train
from tiering.errors import CorruptionError, MegatrainError
from tiering.store import open_reader

STAGES = ("open", "first read", "verify", "verify --deep")
HIDES_THE_REST = frozenset({"root", "link to a drive", "label of a drive"})
"""What makes everything else unreadable, so that nothing else is looked at."""

_NOBODY = 65534
_SHARD_NBYTES = 32 << 10


# -- a store ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a store is made: ``codecs`` are those of records by patterns of their names."""

    layout: Layout
    codecs: Mapping[str, Sequence[str]]


KINDS: Mapping[str, Kind] = {
    "fp32; raw, blosc-zstd-shuffle": Kind(
        layout=Layout.FP32,
        codecs={"blosc-zstd-shuffle": ("*.exp_avg*", "layer.001.*", "carried.*")},
    ),
    "float32; none, zstd, blosc-lz4-bitshuffle": Kind(
        layout=Layout.FLOAT32,
        codecs={
            "none": ("*.master", "carried.*"),
            "zstd": ("*.exp_avg",),
            "blosc-lz4-bitshuffle": ("*.exp_avg_sq",),
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A store with two retained generations and a free slot; ``old_root`` is of one step before."""

    store: Path
    run: Any
    old_root: bytes


def make_trained(folder: Path, kind: Kind, *, drives: int = 3) -> Trained:
    """Convert a model with tied embeddings and a carried tensor, cut it small, train 3 steps."""
    folders = [folder / f"drive-{number}" for number in range(drives)]
    for path in folders:
        path.mkdir(parents=True)
    store, model = folder / "store", _model(folder / "model")
    convert(model, store, drives=folders, layout=kind.layout)
    recode(store, Cut(shard_nbytes=_SHARD_NBYTES))
    for codec, patterns in kind.codecs.items():
        recode(store, Cut(codec=codec, records=tuple(patterns)))
    roots: list[bytes] = []
    config = run_config(
        store,
        token_rows(folder / "rows.jsonl"),
        folder / "run",
        store__retain=2,
        train__dtype="bfloat16" if kind.layout is Layout.FP32 else "float32",
        memory__resident=1,
    )
    # the row of a step is reported before its commit
    train(config, Quiet(lambda row: roots.append((store / "zarr.json").read_bytes())))
    return Trained(store=store, run=config, old_root=roots[-1])


def _model(folder: Path) -> Path:
    tiny_llama(folder, tie=True, vocab_size=301)
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


# -- damage ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Damage:
    """What is done to ``files`` for as long as ``applied`` lasts; at ``offset``, if to a byte."""

    what: str
    files: tuple[StoreFile, ...]
    applied: Callable[[], AbstractContextManager[object]]
    offset: int | None = None


def flip(file: StoreFile, bit: int) -> Damage:
    """Flip one bit of a file, or of what a link says."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        if file.path.is_symlink() and not all(changed):  # a link cannot hold a zero byte
            changed[bit // 8] = 1
        return bytes(changed)

    return Damage("a flipped bit", (file,), lambda: _changed(file.path, change), bit // 8)


def bits(file: StoreFile) -> int:
    """Return how many bits can flip."""
    return 8 * len(_content(file.path))


def any_flip(files: Sequence[StoreFile], rng: random.Random) -> Damage:
    """Flip a bit of any file, or any bit of all files: each is as likely."""
    sizes = [bits(file) for file in files]
    weights = sizes if rng.random() < 0.5 else None
    [number] = rng.choices(range(len(files)), weights)
    return flip(files[number], rng.randrange(sizes[number]))


def other_damage(store: Path) -> Iterator[Damage]:
    """Yield what else can happen to each file that a retained generation consists of."""
    files = byte_map(store)
    for file in files.values():
        data = _content(file.path)
        yield Damage("deleted", (file,), lambda file=file: _deleted(file.path))
        if file.path.is_symlink():
            continue
        yield _change("a byte too short", file, lambda data: data[:-1])
        yield _change("a byte too long", file, lambda data: data + b"\0")
        if any(data):
            yield _change("all zeros", file, lambda data: bytes(len(data)))
            yield Damage("a hole", (file,), lambda file=file: _hole(file.path))
        yield Damage("may not be read", (file,), lambda file=file: _forbidden(file.path))
        older = _older(store, file, files)
        if older is not None and (old := older.read_bytes()) != data:
            yield _change("as a generation earlier", file, lambda data, old=old: old)
    yield from _exchanges(list(files.values()))


def _change(what: str, file: StoreFile, change: Callable[[bytes], bytes]) -> Damage:
    return Damage(what, (file,), lambda: _changed(file.path, change))


def _exchanges(files: Sequence[StoreFile]) -> Iterator[Damage]:
    for one, other in combinations(files, 2):
        a, b = _content(one.path), _content(other.path)
        alike = one.path.is_symlink() == other.path.is_symlink()
        if alike and len(a) == len(b) and a != b:
            yield Damage("exchanged", (one, other), lambda p=one.path, q=other.path: _swapped(p, q))


def _older(store: Path, file: StoreFile, files: Mapping[Path, StoreFile]) -> Path | None:
    """Return what a file of the newest generation was in the one before."""
    root = json.loads((store / "zarr.json").read_text())["attributes"]["megatrain"]
    before, newest = root["generations"]
    if file.generations != {newest["generation"]}:
        return None
    twin = str(file.path)
    for part, key in (("manifests", "generation"), ("slots", "slot")):
        twin = twin.replace(f"/{part}/{newest[key]}/", f"/{part}/{before[key]}/")
    path = Path(twin)
    if path.name.startswith(f"{newest['slot']}."):
        path = path.with_name(f"{before['slot']}.{path.name.partition('.')[2]}")
    found = [other for other in files if other.name == path.name and other.parent == path.parent]
    moved = [other for other in files if other.name == path.name and file.drive is not None]
    return next(iter([*found, *moved]), None)


def _content(path: Path) -> bytes:
    return os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()


def _put(path: Path, data: bytes) -> None:
    """Change a file in place, or make a link anew."""
    if path.is_symlink():
        path.unlink()
        os.symlink(data, os.fsencode(path))
    else:
        path.write_bytes(data)


@contextmanager
def _changed(path: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    kept = _content(path)
    _put(path, change(kept))
    try:
        yield
    finally:
        _put(path, kept)


@contextmanager
def _hole(path: Path) -> Iterator[None]:
    kept = path.read_bytes()
    os.truncate(path, 0)
    os.truncate(path, len(kept))
    try:
        yield
    finally:
        path.write_bytes(kept)


@contextmanager
def _deleted(path: Path) -> Iterator[None]:
    aside = path.with_name("aside")
    path.rename(aside)
    try:
        yield
    finally:
        aside.rename(path)


@contextmanager
def _swapped(one: Path, other: Path) -> Iterator[None]:
    """Give each of two files the other's name; both are where they were afterwards."""

    def swap() -> None:
        aside = one.with_name("aside")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)

    if one.parent.stat().st_dev == other.parent.stat().st_dev:
        swap()
        try:
            yield
        finally:
            swap()


@contextmanager
def _forbidden(path: Path) -> Iterator[None]:
    """Take away the right to read a file; root gives up what makes that no matter."""
    before, user = path.stat().st_mode, os.geteuid()
    path.chmod(0)
    try:
        if user == 0:
            os.seteuid(_NOBODY)
        yield
    finally:
        os.seteuid(user)
        path.chmod(stat.S_IMODE(before))


# -- what is found, and how it is named ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The first of STAGES at which damage is found, or ""; and what is said wrongly of it."""

    stage: str
    wrong: tuple[str, ...]


def judge(store: Path, damage: Damage) -> Verdict:
    """Do damage to a store for a while and see what is found of it."""
    generations = [item["generation"] for item in _listed(store)]
    with damage.applied():
        stage, error = _read(store, generations)
        code, findings, said = verified(store, "--deep")
        if not stage and verified(store)[0]:
            stage = "verify"
    if not stage and code:
        stage = "verify --deep"
    wrong = list(_wrong_error(damage, error)) if error else []
    if code == 1:
        wrong += _wrong_names([damage], findings)
    elif code:  # the root itself cannot be read
        wrong += [] if any(str(file.path) in said for file in damage.files) else [said]
    elif stage:
        wrong.append(f"found at {stage}, and not by verify --deep")
    return Verdict(stage=stage, wrong=tuple(wrong))


def wrong_names(store: Path, damages: Sequence[Damage]) -> list[str]:
    """Return what ``verify --deep --json`` says wrongly of damage that is there now."""
    code, findings, said = verified(store, "--deep")
    return list(_wrong_names(damages, findings)) if code == 1 else [f"exit code {code}: {said}"]


def _listed(store: Path) -> Sequence[Mapping[str, Any]]:
    root = json.loads((store / "zarr.json").read_text())["attributes"]["megatrain"]
    return list(root["generations"])


def verified(store: Path, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run ``verify --json``; return its exit code, what it found, and what it said besides."""
    result = CliRunner().invoke(cli, ["verify", "--json", *options, str(store)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    findings = json.loads(result.stdout)["findings"] if result.exit_code in (0, 1) else []
    return result.exit_code, findings, result.stderr


def _read(store: Path, generations: Sequence[int]) -> tuple[str, MegatrainError | None]:
    """Open and read every generation as an export does; return when that failed, and why."""
    try:
        with ExitStack() as stack:
            readers = [
                stack.enter_context(closing(open_reader(store, generation=number)))
                for number in generations
            ]
            for reader in readers:
                read_schema(reader)
            return _read_bytes(readers)
    except MegatrainError as error:
        return "open", error


def _read_bytes(readers: Sequence[Any]) -> tuple[str, MegatrainError | None]:
    try:
        for reader in readers:
            checked = CheckedReader(reader)
            for record in reader.records.values():
                for _ in checked.read(record, 0, record.nbytes):
                    pass
            for name in reader.schema_names():
                reader.schema_file(name)
    except MegatrainError as error:
        return "first read", error
    return "", None


def _wrong_error(damage: Damage, error: MegatrainError) -> Iterator[str]:
    """Yield what an error that ends a command says wrongly of the damage."""
    if not isinstance(error, CorruptionError):
        if not any(str(file.path) in str(error) for file in damage.files):
            yield f"error does not name the file: {error}"
        return
    named = [file for file in damage.files if str(file.path) == error.file]
    if not named:
        yield f"error is of {error.file!r}: {error}"
        return
    [file] = named
    if file.drive != error.drive:
        yield f"error is of drive {error.drive}, not {file.drive}: {error}"
    if file.record and file.record != error.record:
        yield f"error is of record {error.record!r}, not {file.record!r}: {error}"
    if file.regions and damage.offset is not None:
        yield from _wrong_range(file, damage.offset, error.offset, error.nbytes)


def _wrong_names(damages: Sequence[Damage], findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what ``verify --json`` says wrongly of damages."""
    by_path = {str(file.path): (file, damage) for damage in damages for file in damage.files}
    for finding in findings:
        if finding["file"] not in by_path:
            yield f"it names another file: {finding}"
    seen = {finding["file"] for finding in findings}
    hidden = {path for path, (file, _) in by_path.items() if file.kind in HIDES_THE_REST}
    covered = bool(hidden & seen)
    for path, (file, damage) in by_path.items():
        own = [finding for finding in findings if finding["file"] == path]
        if not own and not covered:
            yield f"it does not name {path}"
        for generation in file.generations if own else ():
            if generation not in {finding["generation"] for finding in own}:
                yield f"it does not say that generation {generation} needs {path}"
        for finding in own:
            yield from _wrong_finding(file, damage, finding)


def _wrong_finding(file: StoreFile, damage: Damage, finding: Mapping[str, Any]) -> Iterator[str]:
    expected = {
        "drive": file.drive,
        "unit": file.unit,
        "role": file.role,
    }
    for key, value in expected.items():
        if finding[key] != value:
            yield f"{key} is not {value!r}: {finding}"
    wanted = file.generations or {None}
    if finding["generation"] not in wanted:
        yield f"generation is none of {wanted}: {finding}"
    if file.regions and damage.offset is not None:
        yield from _wrong_range(file, damage.offset, finding["offset"], finding["nbytes"])
        region = file.region(damage.offset)
        if region.what == "chunk" and set(finding["tensors"]) != set(file.names(region.elements)):
            yield f"tensors are {file.names(region.elements)}: {finding}"
    elif not set(finding["tensors"]) <= set(file.names()):
        yield f"tensors are not among {file.names()}: {finding}"


def _wrong_range(
    file: StoreFile, byte: int, offset: int | None, nbytes: int | None
) -> Iterator[str]:
    """Yield why bytes from ``offset`` on are not what vouches for ``byte``, or a part with it."""
    region = file.region(byte)
    if offset is None:
        yield f"{file.path}: no offset, byte {byte} is wrong"
        return
    stop = region.stop if nbytes is None else offset + nbytes
    if not region.start <= offset <= byte < stop <= region.stop:
        yield (
            f"{file.path}: bytes {offset} to {stop} are named, byte {byte} is wrong, of "
            f"{region.what} {region.start} to {region.stop}"
        )
