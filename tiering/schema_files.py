"""Files that never change after a store is created, each checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tiering import fsops
from tiering.errors import CorruptionError
from tiering.fields import Fields, parse_object, shown
from tiering.manifest import DIGEST, digest, encode_json
from tiering.small_files import DOCUMENT_MOST, SCHEMA_MOST, read_small

_NAME_MOST = 1024


def write_schema_files(store: Path, files: Mapping[str, bytes]) -> str:
    """Write ``files`` below ``schema/<digest>/`` and return the digest of their list.

    They are durable after a sync of the file system.
    """
    index = encode_json({name: digest(data) for name, data in sorted(files.items())})
    key = digest(index)
    folder = store / "schema" / key
    fsops.make_dir(folder)
    for name, data in files.items():
        _make_parents(folder, _checked(name))
        fsops.create_file(folder / name, data)
    fsops.create_file(_index_path(store, key), index)
    return key


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    plain = path.parts and not path.is_absolute() and str(path) == name and name.isprintable()
    if not plain or ".." in path.parts or len(name.encode()) > _NAME_MOST:
        raise ValueError(f"schema file {shown(name)}: not a plain relative path")
    return path


def _make_parents(folder: Path, name: PurePosixPath) -> None:
    for parent in reversed(name.parents[:-1]):
        if not (folder / parent).is_dir():
            fsops.make_dir(folder / parent)


def _index_path(store: Path, key: str) -> Path:
    return store / "schema" / f"{key}.json"


def schema_digests(store: Path, key: str) -> dict[str, str]:
    """Return the sha256 of every schema file by name."""
    path = _index_path(store, key)
    data = _read(path)
    if digest(data) != key:
        raise CorruptionError(f"{path}: found sha256 {digest(data)}, expected {key}", file=path)
    fields = Fields({"files": parse_object(data, path)}, path, "")
    digests = fields.patterns("files", DIGEST)
    try:
        for name in digests:
            _checked(name)
    except ValueError as error:  # such a file would be written elsewhere by who copies them
        raise CorruptionError(f"{path}: {error}", file=path) from error
    return digests


def read_schema_file(store: Path, key: str, name: str) -> bytes:
    """Return the content of one schema file.

    Raises:
        KeyError: There is none of that name.
        CorruptionError: It is missing or was changed.
    """
    expected = schema_digests(store, key)[name]
    path = store / "schema" / key / name
    data = _read(path, SCHEMA_MOST)
    if digest(data) != expected:
        raise CorruptionError(
            f"{path}: found sha256 {digest(data)}, expected {expected}", file=path
        )
    return data


def _read(path: Path, most: int = DOCUMENT_MOST) -> bytes:
    try:
        return read_small(path, most)
    except FileNotFoundError as error:
        raise CorruptionError(
            f"{path}: missing; it was written when the store was made", file=path
        ) from error
