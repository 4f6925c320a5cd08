"""The file in a drive's folder that says which store and which drive it belongs to."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiering.fields import Fields, parse_object
from tiering.manifest import FORMAT, check_of
from tiering.small_files import LABEL_MOST, read_small

LABEL = "drive.json"
_OWNER = ("store", "folder", "check")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Which of the stores with one uuid a drive belongs to: a copy of a store has its links too.

    ``folder`` tells the store's folder from a copy of it, also where it was moved meanwhile.
    """

    store: Path
    folder: str


def owner_of(store: Path) -> Owner:
    """Return what the labels of the drives of ``store`` say of it."""
    return Owner(store=store, folder=identity(store))


def identity(folder: Path) -> str:
    """Return what a folder keeps when it is renamed, and its copy does not have."""
    return f"{os.statvfs(folder).f_fsid:x}:{os.stat(folder).st_ino}"


def expected_label(uuid: str, number: int, owner: Owner | None = None) -> bytes:
    """Return the content of the label of a drive.

    There is no ``owner`` where the drive lies in the store, and goes with it wherever it goes.
    """
    label: dict[str, Any] = {"format": FORMAT, "uuid": uuid, "drive": number}
    if owner is not None:
        label |= {"store": str(owner.store), "folder": owner.folder}
        label["check"] = check_of(label)
    # ASCII: the path of a store need not be text, and is escaped then
    return json.dumps(label, indent=1).encode() + b"\n"


def read_label(folder: Path) -> tuple[object, object]:
    """Return which store and which drive a folder says that it belongs to.

    Raises:
        FileNotFoundError: It has no label.
    """
    label = _parse(folder)
    return label.get("uuid"), label.get("drive")


def read_owner(folder: Path) -> Owner | None:
    """Return which store wrote the label of a drive; None if it does not say.

    Raises:
        FileNotFoundError: It has no label.
        CorruptionError: What it says of that is damaged.
    """
    label = _parse(folder)
    if label.keys().isdisjoint(_OWNER):
        return None
    fields = Fields(label, folder / LABEL, "")
    owner = Owner(store=Path(fields.text("store")), folder=fields.text("folder"))
    fields.equal("check", check_of(label), "the sha256 of the rest")
    if not owner.store.is_absolute() or "\0" in str(owner.store):
        raise fields.error("store", str(owner.store), "an absolute path")
    return owner


def _parse(folder: Path) -> dict[str, Any]:
    path = folder / LABEL
    return parse_object(read_small(path, LABEL_MOST), path)
