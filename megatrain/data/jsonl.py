"""JSONL as people write it: one streaming pass that checks every line, and reads by number."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tiering.errors import NOT_THERE, CorruptionError, RefusedError, StorageError

log = logging.getLogger(__name__)

Kind = Literal["text", "messages", "input_ids"]
KINDS: tuple[Kind, ...] = ("text", "messages", "input_ids")
IGNORED = -100  # a label that is no target
_REPORTED = 10  # bad lines that are named when they are left out; all are counted
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Where the records of a file are, and what the file was when it was scanned."""

    path: Path
    fingerprint: str
    kinds: frozenset[Kind]
    offsets: array[int]
    lengths: array[int]
    lines: array[int]
    checksums: array[int]
    skipped: int

    def __len__(self) -> int:
        return len(self.offsets)

    def place(self, i: int) -> str:
        """Return file and line of record ``i``, for messages."""
        return f"{self.path}:{self.lines[i]}"


def scan(
    path: Path,
    *,
    vocab_size: int | None = None,
    skip_bad_lines: bool = False,
    check_more: Callable[[dict[str, Any]], None] | None = None,
) -> Index:
    """Check every line of the file and return where its records are.

    ``check_more`` raises ValueError for a record that is well made and yet of no use.
    Memory: 28 bytes a record, and the longest line.

    Raises:
        RefusedError: A line that is no usable record, named by file and line, or no record at all.
    """
    digest, skipped = hashlib.sha256(), 0
    kinds: set[Kind] = set()
    offsets, lengths, lines, checksums = array("Q"), array("Q"), array("Q"), array("I")
    for number, offset, line in _lines(path):
        digest.update(line)
        if not _content(line):
            continue
        try:
            record = parse(line)
            kind = check(record, vocab_size)
            if check_more:
                check_more(record)
        except ValueError as error:
            if not skip_bad_lines:
                raise RefusedError(f"{path}:{number}: {error}{_hint(number, line)}") from error
            skipped += 1
            if skipped <= _REPORTED:
                log.warning("%s:%d: left out: %s", path, number, error)
            continue
        kinds.add(kind)
        offsets.append(offset)
        lengths.append(len(line))
        lines.append(number)
        checksums.append(zlib.crc32(line))
    if not offsets:
        raise RefusedError(f"{path} holds no records")
    return Index(
        path=path,
        fingerprint=digest.hexdigest(),
        kinds=frozenset(kinds),
        offsets=offsets,
        lengths=lengths,
        lines=lines,
        checksums=checksums,
        skipped=skipped,
    )


def read(index: Index, fd: int, i: int) -> dict[str, Any]:
    """Return record ``i`` from ``fd``, the open file of ``index``; threads may share it.

    Raises:
        CorruptionError: The line is not the one that was scanned.
        StorageError: It cannot be read.
    """
    line = _pread(index.path, fd, index.lengths[i], index.offsets[i])
    if zlib.crc32(line) != index.checksums[i]:
        raise CorruptionError(f"{index.place(i)}: the file has changed since it was scanned")
    return parse(line)


def _pread(path: Path, fd: int, nbytes: int, offset: int) -> bytes:
    """Return the bytes of a range, fewer only where the file ends."""
    parts, moved = [], 0
    try:
        while moved < nbytes and (part := os.pread(fd, nbytes - moved, offset + moved)):
            parts.append(part)
            moved += len(part)
    except OSError as error:
        raise StorageError(
            "read", path, errno=error.errno or 0, offset=offset + moved, wanted=nbytes, moved=moved
        ) from error
    return b"".join(parts)


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, offset and bytes of each line."""
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, offset, line
                offset += len(line)
    except NOT_THERE as error:
        raise RefusedError(f"cannot read data file {path}: {error.strerror}") from error
    except OSError as error:
        raise StorageError("read", path, errno=error.errno or 0, offset=offset) from error


def _content(line: bytes) -> bytes:
    return line.removeprefix(_BYTE_ORDER_MARK).strip()


def _hint(number: int, line: bytes) -> str:
    if number == 1 and _content(line).startswith(b"["):
        return "; the file looks like one JSON array: write one object a line"
    if number == 1 and line.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return "; the file is compressed: unpack it first"
    if number == 1 and line.startswith(b"PAR1"):
        return "; the file is Parquet: write it as JSONL, one object a line"
    if number == 1 and (line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"{\0" in line[:2]):
        return "; the file looks like UTF-16: save it as UTF-8"
    return ""


def parse(line: bytes) -> dict[str, Any]:
    """Return the object on a line.

    Raises:
        ValueError: With a sentence for the user.
    """
    try:
        record = json.loads(_content(line).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.object[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise ValueError(f"more than one JSON value, from column {error.colno}") from error
        raise ValueError(f"not JSON: {error.msg} in column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not usable JSON: nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {_named(record)}")
    if b"\\ud" in line.lower():  # half a surrogate pair parses, but no tokenizer takes it
        _check_encodes(record)
    return record


def check(record: dict[str, Any], vocab_size: int | None) -> Kind:
    """Return the kind of a usable record.

    Raises:
        ValueError: With a sentence for the user.
    """
    found: list[Kind] = [kind for kind in KINDS if kind in record]
    if len(found) != 1:
        has = " and ".join(found) or f"only {', '.join(sorted(record)) or 'an empty object'}"
        raise ValueError(f"expected one of {', '.join(KINDS)}; found {has}")
    kind = found[0]
    if kind == "text" and not isinstance(record["text"], str):
        raise ValueError(f"text must be a string, found {_named(record['text'])}")
    if kind == "messages":
        _check_messages(record["messages"])
    if kind == "input_ids":
        _check_tokens(record, vocab_size)
    return kind


def _check_encodes(record: dict[str, Any]) -> None:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("text holds half of a surrogate pair") from error


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{number}] must be an object with a role")
        if not isinstance(message.get("content", ""), (str, list)) and "tool_calls" not in message:
            raise ValueError(f"messages[{number}].content must be a string")


def _check_tokens(record: dict[str, Any], vocab_size: int | None) -> None:
    ids = record["input_ids"]
    _check_ids("input_ids", ids, vocab_size)
    labels = record.get("labels", ids)
    _check_ids("labels", labels, vocab_size, ignored=IGNORED)
    if len(labels) != len(ids):
        raise ValueError(f"{len(ids)} input_ids but {len(labels)} labels")


def _check_ids(key: str, ids: object, vocab_size: int | None, ignored: int | None = None) -> None:
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise ValueError(f"{key} must be a list of at least one integer")
    end = vocab_size or sys.maxsize
    for token in ids:
        if not 0 <= token < end and token != ignored:
            raise ValueError(f"{key} holds {token}; the vocabulary is 0 to {end - 1}")


def _named(value: object) -> str:
    names = {list: "an array", str: "a string", dict: "an object", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")
