"""Stores that somebody changed with intent: every digest above the change fits it again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Edit = Callable[[Any], object]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sealed(pointer: dict[str, Any]) -> dict[str, Any]:
    """Return what the root says with a check that fits it."""
    rest = {key: value for key, value in pointer.items() if key != "check"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "check": sha256(text.encode())}


def edit_root(store: Path, edit: Edit) -> None:
    path = store / "zarr.json"
    document = json.loads(path.read_text())
    pointer = document["attributes"]["megatrain"]
    edit(pointer)
    document["attributes"]["megatrain"] = sealed(pointer)
    path.write_text(json.dumps(document))


def replace_manifest(store: Path, data: bytes, number: int = 3) -> None:
    """Give a generation another manifest, to which the root agrees."""
    (store / "manifests" / str(number) / "manifest.json").write_bytes(data)

    def agree(pointer: dict[str, Any]) -> None:
        for generation in pointer["generations"]:
            if generation["generation"] == number:
                generation["sha256"] = sha256(data)
        pointer["sha256"] = pointer["generations"][-1]["sha256"]

    edit_root(store, agree)


def edit_manifest(store: Path, edit: Edit, number: int = 3) -> None:
    document = json.loads((store / "manifests" / str(number) / "manifest.json").read_text())
    edit(document)
    replace_manifest(store, json.dumps(document).encode(), number)


def replace_table(store: Path, data: bytes) -> None:
    (store / "manifests" / "3" / "checksums.bin").write_bytes(data)
    edit_manifest(store, lambda m: m.update(table=sha256(data)))


def edit_array(store: Path, record: str, edit: Edit) -> None:
    """Change the metadata of an array of the newest generation."""
    path = store / "slots" / "2" / record / "zarr.json"
    document = json.loads(path.read_text())
    edit(document)
    data = json.dumps(document).encode()
    path.write_bytes(data)
    edit_manifest(store, lambda m: m["metadata"].update({f"{record}/zarr.json": sha256(data)}))


def rename_schema(store: Path, edit: Callable[[dict[str, str]], object]) -> None:
    """Change the list of schema files, and the key with it."""
    [folder] = [path for path in (store / "schema").iterdir() if path.is_dir()]
    listed = folder.with_suffix(".json")
    index = json.loads(listed.read_text())
    edit(index)
    data = json.dumps(index).encode()
    listed.unlink()
    folder = folder.rename(folder.with_name(sha256(data)))
    folder.with_suffix(".json").write_bytes(data)
    edit_root(store, lambda p: p.update(schema=sha256(data)))


def replace_schema(store: Path, data: bytes) -> None:
    [path] = (store / "schema").glob("*/schema.json")
    path.write_bytes(data)
    rename_schema(store, lambda index: index.update({"schema.json": sha256(data)}))


def edit_schema(store: Path, edit: Edit) -> None:
    [path] = (store / "schema").glob("*/schema.json")
    document = json.loads(path.read_text())
    edit(document)
    replace_schema(store, json.dumps(document).encode())


# -- other things in the place of files ----------------------------------------------------------


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path, target: str | Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    path.symlink_to(target)


def aside(path: Path, target: Path) -> None:
    """Put a link to ``target`` where a folder is, which goes there."""
    path.rename(target)
    path.symlink_to(target)


def hole(path: Path, nbytes: int) -> None:
    """Make a file that long; it takes no room."""
    path.touch()
    os.truncate(path, nbytes)


def swap(one: Path, other: Path) -> None:
    targets = os.readlink(one), os.readlink(other)
    for path, target in ((one, targets[1]), (other, targets[0])):
        path.unlink()
        path.symlink_to(target)
