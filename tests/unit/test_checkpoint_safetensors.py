from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from checkpoint.formats.hf import read_header
from checkpoint.formats.safetensors import encode_header
from tests.support.hf_folders import raw_file
from tiering.errors import RefusedError

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SECOND = {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]}

# (file, a part of the message; "" where the file is good)
FILES: dict[str, tuple[bytes, str]] = {
    "good": (raw_file({"a": ENTRY}, bytes(8)), ""),
    "two tensors": (raw_file({"b": SECOND, "a": ENTRY}, bytes(14)), ""),
    "scalar": (raw_file({"a": {**ENTRY, "shape": [], "data_offsets": [0, 4]}}, bytes(4)), ""),
    "no elements": (raw_file({"a": {**ENTRY, "shape": [0], "data_offsets": [0, 0]}}, b""), ""),
    "metadata empty": (raw_file({"__metadata__": {}, "a": ENTRY}, bytes(8)), ""),
    "metadata null": (raw_file({"__metadata__": None, "a": ENTRY}, bytes(8)), ""),
    "metadata number": (
        raw_file({"__metadata__": {"k": 3}, "a": ENTRY}, bytes(8)),
        "'k' must be a string, found 3 at byte 31",
    ),
    "metadata list": (
        raw_file({"a": ENTRY, "__metadata__": []}, bytes(8)),
        "__metadata__ must be an object of strings, found []",
    ),
    "padded with spaces": (raw_file(json.dumps({"a": ENTRY}).encode() + b"   ", bytes(8)), ""),
    "starts with white space": (raw_file(b"\n " + json.dumps({"a": ENTRY}).encode(), bytes(8)), ""),
    "padded with NUL": (
        raw_file(json.dumps({"a": ENTRY}).encode() + b"\0\0", bytes(8)),
        "Extra data at byte 69, found '\\x00'",
    ),
    "empty file": (b"", "it is empty"),
    "seven bytes": (b"\x01\0\0\0\0\0\0", "7 B, too short"),
    "header cut": (raw_file({"a": ENTRY}, b"")[:40], "cut off inside its header"),
    "header too long": ((10**9).to_bytes(8, "little") + b"{}", "announce a header of 1000000000 B"),
    "data cut": (
        raw_file({"a": ENTRY, "b": SECOND}, bytes(10)),
        "4 B missing; first incomplete tensor: b",
    ),
    "data too long": (raw_file({"a": ENTRY}, bytes(9)), "1 B follow the last tensor"),
    "gap": (
        raw_file({"a": ENTRY, "b": {**SECOND, "data_offsets": [9, 15]}}, bytes(15)),
        "'a' and 'b' leave a gap",
    ),
    "overlap": (
        raw_file({"a": ENTRY, "b": {**SECOND, "data_offsets": [6, 12]}}, bytes(12)),
        "'a' and 'b' overlap",
    ),
    "starts late": (
        raw_file({"a": {**ENTRY, "data_offsets": [1, 9]}}, bytes(9)),
        "'a' starts 1 B into the data",
    ),
    "wrong size": (
        raw_file({"a": {**ENTRY, "shape": [3]}}, bytes(8)),
        "shape [3] of F32 needs 12 B, data_offsets [0, 8] hold 8 B",
    ),
    "unknown dtype": (raw_file({"a": {**ENTRY, "dtype": "F31"}}, bytes(8)), "data type 'F31'"),
    "dtype is a list": (raw_file({"a": {**ENTRY, "dtype": []}}, bytes(8)), "data type []"),
    "backwards": (
        raw_file({"a": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
        "bad data_offsets [8, 0]",
    ),
    "negative": (
        raw_file({"a": {**ENTRY, "shape": [-2]}}, bytes(8)),
        "shape must be a list of whole numbers, found [-2]",
    ),
    "float shape": (raw_file({"a": {**ENTRY, "shape": [2.0]}}, bytes(8)), "whole numbers"),
    "no shape": (raw_file({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "shape"),
    "half a byte": (
        raw_file({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, bytes(1)),
        "does not fill whole bytes",
    ),
    "tensor is a number": (raw_file({"a": 3}, b""), "'a': expected an object, found 3"),
    "not an object": (raw_file(b"[]", b""), "not a JSON object"),
    "not JSON": (raw_file(b'{"a": }', b""), "at byte 14, found '}'"),
    "not UTF-8": (raw_file(b'{"a\xff": 1}', b""), "not UTF-8 at byte 11"),
    "not a number": (raw_file(b'{"a": NaN}', b""), "NaN is not a number of JSON"),
    "deep": (raw_file(b"[" * 50_000, b""), "not JSON"),
}


@pytest.mark.parametrize(("data", "message"), FILES.values(), ids=FILES)
def test_our_verdict_on_a_file_is_that_of_the_reference(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    try:
        with safe_open(path, framework="pt") as file:
            reference = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        reference = None
    if message:
        assert reference is None
        with pytest.raises(RefusedError) as caught:
            read_header(tmp_path, path.name)
        assert message in str(caught.value)
        assert str(path) in str(caught.value)
    else:
        header = read_header(tmp_path, path.name)
        assert {tensor.name: list(tensor.shape) for tensor in header.tensors} == reference


def test_one_name_twice_is_refused(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'  # noqa: E501
    (tmp_path / "a.safetensors").write_bytes(raw_file(header, b"1"))
    with pytest.raises(RefusedError, match="'a' is there twice"):
        read_header(tmp_path, "a.safetensors")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n",
            "Git LFS pointer for a file of 123456 B; fetch the real file",
        ),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer; fetch"),
        (b"<!DOCTYPE html><html><body>sign in</body></html>", "HTML"),
        (b"\n  <html>", "HTML"),
        (b'<?xml version="1.0"?><Error/>', "XML"),
        (b"PK\x03\x04" + bytes(60), "pickle"),
        (b"GGUF" + bytes(60), "GGUF"),
        (bytes(4096), "zeros only"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(
    tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(RefusedError, match=message):
        read_header(tmp_path, "a.safetensors")


def test_the_header_we_write_is_the_one_of_the_reference(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2, 3), "a": torch.ones(5, dtype=torch.bfloat16)}
    path = tmp_path / "reference.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = encode_header([("b", "F32", (2, 3)), ("a", "BF16", (5,))], {"format": "pt"})
    data = tensors["b"].numpy().tobytes() + tensors["a"].view(torch.uint16).numpy().tobytes()
    assert path.read_bytes() == header + data
