"""Every field of a store's documents with every wrong value: refused by its name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.schema import Schema
from megatrain.train_state import TrainState
from tests.support.golden import STORE, TRAINED, train_state
from tests.support.hostile import sealed
from tiering.errors import RefusedError
from tiering.manifest import Manifest, Root

VALUES = (  # as they stand in a file
    "null",
    "true",
    "-1",
    "0.5",
    "1e400",
    "NaN",
    str(10**30),
    "9" * 4000,
    str(2**63),
    '""',
    f'"{"x" * 100_000}"',
    '"../../etc"',
    r'"\u001b[2J\n"',
    r'"\ud800"',
    "[]",
    "[-1]",
    "{}",
    '{"": 0}',
    "[" * 900 + "]" * 900,
)
FINE: dict[str, Callable[[str], bool]] = {  # values that a field may well have
    "share": lambda v: v == "0.5",
    "parent": lambda v: v == "null",
    "codec": lambda v: v == "null",
    "shared": lambda v: v == "true",
    "train_state": lambda v: v.startswith("{"),
}


def fields_of(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field of a document; of lists and maps of alike only the last."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield (*path, key)
            if key not in ("train_state", "metadata"):
                yield from fields_of(value, (*path, key))
    elif isinstance(document, list) and document:
        yield from fields_of(document[-1], (*path, len(document) - 1))


def with_value(document: Any, path: tuple[Any, ...], value: str) -> bytes:
    """Return a document as JSON in which a field has a value, which is given as JSON."""
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "@"
    return json.dumps(changed).replace('"@"', value).encode()


ROOT = json.loads((STORE / "zarr.json").read_text())["attributes"]["megatrain"]
MANIFEST = json.loads((STORE / "manifests/3/manifest.json").read_text())
MANIFEST["records"] = {k: MANIFEST["records"][k] for k in ("layer.000.master", "outer_in.master")}
MANIFEST["metadata"] = {
    name: sha
    for name, sha in MANIFEST["metadata"].items()
    if name == "zarr.json" or name.removesuffix("/zarr.json") in MANIFEST["records"]
}
for number, entry in enumerate(MANIFEST["records"].values()):
    entry["first"] = number
SCHEMA = json.loads(next((STORE / "schema").glob("*/schema.json")).read_text())
STATE = train_state(3).encode()


def decode_root(pointer: bytes) -> object:
    whole = b'{"zarr_format": 3, "node_type": "group", "attributes": {"megatrain": %s}}' % pointer
    return Root.decode(whole, Path("/s/zarr.json"))


def decode_manifest(document: bytes) -> object:
    return Manifest.decode(document, Path("/s/manifest.json"))


def decode_state(document: bytes) -> object:
    return TrainState.decode(json.loads(document), TRAINED)


def encoded(document: Any) -> bytes:
    return json.dumps(sealed(document) if "check" in document else document).encode()


DOCUMENTS: dict[str, tuple[Callable[[bytes], object], Any]] = {
    "root": (decode_root, ROOT),
    "manifest": (decode_manifest, MANIFEST),
    "schema": (Schema.decode, SCHEMA),
    "train state": (decode_state, STATE),
}


def test_the_documents_are_fine_before_they_are_changed():
    for decode, document in DOCUMENTS.values():
        decode(encoded(document))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param(name, path, id=f"{name} {'.'.join(map(str, path))}")
        for name, (_, document) in DOCUMENTS.items()
        for path in fields_of(document)
        if path not in (("check",), ("rng",), ("digest",), ("rng", "scheme"), ("rng", "seed"))
    ],
)
def test_a_field_with_any_other_value_is_refused_by_its_name(name, path):
    decode, document = DOCUMENTS[name]
    for value in VALUES:
        key = next(key for key in reversed(path) if isinstance(key, str))
        if FINE.get(key, lambda v: False)(value) or is_free(name, path, value):
            continue
        with pytest.raises(RefusedError) as caught:
            decode(with_value(document, path, value))
        message = str(caught.value)
        assert key in message or "metadata" in message or "JSON" in message or name == "schema"
        assert message.isprintable(), "what a store says must not move the cursor"
        assert len(message) < 2000


FREE_TEXT = {"model_type", "reason", "stripped", "added", "run_id", "data", "alias"}


def is_free(name: str, path: tuple[Any, ...], value: str) -> bool:
    """Whether a field may have that value: some texts are anything, some lists and maps empty."""
    if path[-1] == "shape":
        return value == "[]"
    if path[-1] in FREE_TEXT or (path[-1] == "name" and "units" not in path):
        return value.startswith('"')
    if path[-1] in ("trainable", "in_source"):
        return value == "true"
    empty = {"ties": "[]", "notes": "[]", "ignored": "[]", "sources": "[]", "files": "{}"}
    if path[-1] == "updates_of":
        return value in ("{}", '{"": 0}')
    if path == ("units", 5, "tensors", 0, "name"):
        return value.startswith('"')
    return name == "schema" and empty.get(path[-1]) == value


def test_a_configuration_in_a_train_state_is_read_as_strictly_as_a_run_file():
    for text in ("[" * 100_000, "{}", '{"model": 1}', "\x00"):
        with pytest.raises(RefusedError, match=r"train_state\.config") as caught:
            decode_state(encoded(STATE | {"config": text}))
        assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["root", "manifest", "schema"])
def test_a_newer_format_says_so_whatever_else_is_in_it(name):
    decode, document = DOCUMENTS[name]
    for changed in (document | {"format": 2}, {"format": 2, "check": "", "other": 1}):
        with pytest.raises(RefusedError, match="in format 2, this program reads up to format 1"):
            decode(encoded(changed))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_field_that_is_missing_or_unknown_is_refused(name):
    decode, document = DOCUMENTS[name]
    for path in fields_of(document):
        if path[0] in ("check", "files", "digest", "rng") or isinstance(path[-1], int):
            continue
        if path[-2:-1] in (("records",), ("updates_of",)):
            continue
        changed = copy.deepcopy(document)
        place = changed
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        with pytest.raises(RefusedError):
            decode(encoded(changed))
    if name != "train state":  # later versions may know more of a run
        with pytest.raises(RefusedError, match="surprise"):
            decode(encoded(document | {"surprise": 1}))
