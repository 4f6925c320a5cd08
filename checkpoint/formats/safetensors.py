"""The safetensors format: a strict parser of headers, and the exact header to write.

A file is eight bytes (little-endian length of the header), the header (JSON), and the data. The
rules are those of the reference library; the messages say where a file departs from them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from checkpoint.formats.files import stands_for, unique_pairs
from tiering.errors import CorruptionError
from tiering.records import round_up

MAX_HEADER_NBYTES = 100_000_000  # the reference library reads no longer header
PREFIX_NBYTES = 8
METADATA_KEY = "__metadata__"

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of one file; its bytes are ``[start, end)`` counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length of the tensor's bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What one file holds, in the order of its bytes."""

    file: str
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class _RefusalError(Exception):
    """What is wrong with a header, without the name of the file."""


def check_start(start: bytes, file: str, file_nbytes: int) -> int:
    """Return the length of the header of the file that begins with ``start``.

    ``start`` is the first 512 bytes, or all there are.

    Raises:
        CorruptionError: It is another kind of file, or ends within its header.
    """
    if kind := _what_it_is_instead(start):
        raise CorruptionError(f"{file}: not a safetensors file: {kind}")
    if file_nbytes < PREFIX_NBYTES:
        raise CorruptionError(f"{file}: {file_nbytes} B, too short for a safetensors file")
    length = int.from_bytes(start[:PREFIX_NBYTES], "little")
    if length > MAX_HEADER_NBYTES:
        raise CorruptionError(
            f"{file}: not a safetensors file, or damaged: its first 8 bytes announce a header of "
            f"{length} B, at most {MAX_HEADER_NBYTES} B are allowed"
        )
    if (wanted := PREFIX_NBYTES + length) > file_nbytes:
        raise CorruptionError(
            f"{file}: cut off inside its header: the header ends at byte {wanted}, "
            f"the file has {file_nbytes} B, {wanted - file_nbytes} B are missing"
        )
    return length


def parse_header(header: bytes, file: str, file_nbytes: int) -> Header:
    """Return what a header says, after comparing it with the length of its file.

    Raises:
        CorruptionError: The header is malformed, or promises fewer or more bytes than there are.
    """
    try:
        entries = _parse_json(header)
        metadata = _metadata(entries.pop(METADATA_KEY, None), header)
        base = PREFIX_NBYTES + len(header)
        tensors = [_tensor(name, entry, file, base) for name, entry in entries.items()]
        tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
        _check_contiguous(tensors, base)
        _check_length(tensors, base, file_nbytes)
    except _RefusalError as refusal:
        raise CorruptionError(f"{file}: {refusal}") from refusal
    return Header(file=file, tensors=tuple(tensors), metadata=metadata)


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the length and the header for (name, dtype, shape) whose bytes follow in this order.

    Padded with spaces, so that the data starts at a multiple of eight bytes.
    """
    document: dict[str, Any] = {METADATA_KEY: dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + tensor_nbytes(dtype, shape)
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (round_up(len(text), 8) - len(text))
    return len(text).to_bytes(PREFIX_NBYTES, "little") + text


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor; a tensor of sub-byte elements must fill whole bytes."""
    nbytes, rest = divmod(math.prod(shape) * DTYPE_BITS[dtype], 8)
    if rest:
        raise ValueError(f"{list(shape)} of {dtype} does not fill whole bytes")
    return nbytes


def _what_it_is_instead(start: bytes) -> str:
    if not start:
        return "it is empty"
    if pointer := stands_for(start):
        return pointer
    if re.match(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml|head|body)", start, re.IGNORECASE):
        return "it is an HTML or XML page, most likely a failed download; fetch it again"
    if start.startswith(b"PK\x03\x04"):
        return "it is a PyTorch pickle (or another zip file)"
    if start.startswith(b"GGUF"):
        return "it is a GGUF file"
    if not start.strip(b"\0"):
        return "it begins with zeros only, most likely an unfinished download; fetch it again"
    text = start[:60]  # a header's length has zeros in it
    if len(start) >= PREFIX_NBYTES and text.isascii() and text.decode().isprintable():
        return f"it is text that begins with {text.decode()!r}, most likely a failed download"
    return ""


def _parse_json(header: bytes) -> dict[str, Any]:
    text = _decode(header)
    try:
        document = json.loads(text, object_pairs_hook=unique_pairs, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = PREFIX_NBYTES + len(text[: error.pos].encode())
        found = f", found {text[error.pos]!r}" if error.pos < len(text) else ""
        raise _RefusalError(f"header is not JSON: {error.msg} at byte {where}{found}") from error
    except (ValueError, RecursionError) as error:
        raise _RefusalError(f"header is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise _RefusalError("header is not a JSON object")
    return document


def _decode(header: bytes) -> str:
    try:
        return header.decode()
    except UnicodeDecodeError as error:
        where = PREFIX_NBYTES + error.start
        raise _RefusalError(
            f"header is not UTF-8 at byte {where}; not a safetensors file?"
        ) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _metadata(value: object, header: bytes) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        where = _place_of(header, METADATA_KEY)
        raise _RefusalError(f"{METADATA_KEY} must be an object of strings, found {value!r} {where}")
    for key, item in value.items():
        if not isinstance(item, str):
            where = _place_of(header, METADATA_KEY, key)
            raise _RefusalError(f"{METADATA_KEY}: {key!r} must be a string, found {item!r} {where}")
    return value


def _place_of(header: bytes, *keys: str) -> str:
    """Return "at byte N" for the value behind nested ``keys``; keys as plainly spelled."""
    position = 0
    for key in keys:
        spelled = re.escape(json.dumps(key, ensure_ascii=False).encode())
        if found := re.compile(spelled + rb"\s*:\s*").search(header, position):
            position = found.end()
    return f"at byte {PREFIX_NBYTES + position}"


def _tensor(name: str, entry: object, file: str, base: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _RefusalError(f"tensor {name!r}: expected an object, found {entry!r}")
    dtype, shape = entry.get("dtype"), _integers(name, entry, "shape")
    offsets = _integers(name, entry, "data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _RefusalError(f"tensor {name!r}: unknown data type {dtype!r}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _RefusalError(f"tensor {name!r}: bad data_offsets {list(offsets)}")
    try:
        wanted = tensor_nbytes(dtype, shape)
    except ValueError as error:
        raise _RefusalError(f"tensor {name!r}: {error}") from error
    if offsets[1] - offsets[0] != wanted:
        raise _RefusalError(
            f"tensor {name!r}: shape {list(shape)} of {dtype} needs {wanted} B, "
            f"data_offsets {list(offsets)} hold {offsets[1] - offsets[0]} B"
        )
    start, end = base + offsets[0], base + offsets[1]
    return TensorInfo(name=name, dtype=dtype, shape=shape, file=file, start=start, end=end)


def _integers(name: str, entry: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = entry.get(key)
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    raise _RefusalError(f"tensor {name!r}: {key} must be a list of whole numbers, found {value!r}")


def _check_contiguous(tensors: Sequence[TensorInfo], base: int) -> None:
    if tensors and tensors[0].start != base:
        first = tensors[0]
        raise _RefusalError(
            f"tensor {first.name!r} starts {first.start - base} B into the data, not 0"
        )
    for left, right in pairwise(tensors):
        if left.end != right.start:
            what = "overlap" if right.start < left.end else "leave a gap"
            raise _RefusalError(
                f"tensors {left.name!r} and {right.name!r} {what}: "
                f"one ends at byte {left.end}, the next starts at {right.start}"
            )


def _check_length(tensors: Sequence[TensorInfo], base: int, file_nbytes: int) -> None:
    wanted = tensors[-1].end if tensors else base
    if file_nbytes < wanted:
        lost = next(tensor for tensor in tensors if tensor.end > file_nbytes)
        raise _RefusalError(
            f"too short: expected {wanted} B, found {file_nbytes} B, "
            f"{wanted - file_nbytes} B missing; first incomplete tensor: {lost.name}"
        )
    if file_nbytes > wanted:
        raise _RefusalError(
            f"too long: expected {wanted} B, found {file_nbytes} B, "
            f"{file_nbytes - wanted} B follow the last tensor"
        )
