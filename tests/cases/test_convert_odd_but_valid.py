"""Files that look odd and are fine, and the two that only nearly are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_cli import refuse, round_trip, run
from tests.support.hf_folders import (
    INDEX,
    SINGLE,
    make_llama,
    raw_file,
    shard,
    split_file,
    write_json,
)


@pytest.mark.parametrize(
    ("metadata", "before", "after"),
    [
        ({}, b"", b""),
        (None, b"", b""),
        ("absent", b"", b""),
        ({"by": "someone"}, b"", b""),
        ({"format": "np", "ünicode": "☃"}, b"", b""),
        ({}, b"", b" " * 13),
        ({}, b"\n ", b""),
        ({}, b"\t\r\n", b"\n\n"),
    ],
)
def test_optional_metadata_and_white_space_are_fine(
    tmp_path: Path, metadata: Any, before: bytes, after: bytes
) -> None:
    tensors = make_llama(tmp_path / "model")
    path = tmp_path / "model" / SINGLE
    header, data = split_file(path)
    del header["__metadata__"]
    if metadata != "absent":
        header["__metadata__"] = metadata
    path.write_bytes(raw_file(before + json.dumps(header).encode() + after, data))
    assert round_trip(tmp_path / "model", tensors) == ""


@pytest.mark.parametrize(
    ("metadata", "after", "message"),
    [
        ({}, b"\0" * 3, "found '\\x00'"),
        ({"step": 3}, b"", "'step' must be a string, found 3 at byte "),
        ({"nested": {}}, b"", "'nested' must be a string, found {} at byte "),
        ({"null": None}, b"", "'null' must be a string, found None at byte "),
        (["list"], b"", "must be an object of strings"),
    ],
)
def test_what_the_reference_refuses_is_refused_with_file_and_byte(
    tmp_path: Path, metadata: Any, after: bytes, message: str
) -> None:
    make_llama(tmp_path / "model")
    path = tmp_path / "model" / SINGLE
    header, data = split_file(path)
    header["__metadata__"] = metadata
    text = json.dumps(header).encode() + after
    path.write_bytes(raw_file(text, data))
    said = refuse(tmp_path / "model")
    assert message in said
    assert str(path) in said
    if after:
        assert f"at byte {8 + len(text) - len(after)}," in said


@pytest.mark.parametrize("metadata", ["absent", None, {}, {"total_size": None}, []])
def test_an_index_needs_no_metadata(tmp_path: Path, metadata: Any) -> None:
    tensors = make_llama(tmp_path / "model")
    index = shard(tmp_path / "model", tensors, 2)
    del index["metadata"]
    if metadata != "absent":
        index["metadata"] = metadata
    write_json(tmp_path / "model" / INDEX, index)
    assert round_trip(tmp_path / "model", tensors) == ""


@pytest.mark.parametrize("total", [1, 43328 + 1, "43328", 43328.5])
def test_a_wrong_total_size_is_a_note_with_both_numbers(tmp_path: Path, total: object) -> None:
    tensors = make_llama(tmp_path / "model")
    index = shard(tmp_path / "model", tensors, 2)
    index["metadata"]["total_size"] = total
    write_json(tmp_path / "model" / INDEX, index)
    notes = round_trip(tmp_path / "model", tensors)
    assert str(total) in notes
    assert "43328" in notes


@pytest.mark.parametrize("name", [INDEX, "config.json", "generation_config.json"])
def test_json_may_begin_with_a_byte_order_mark(tmp_path: Path, name: str) -> None:
    tensors = make_llama(tmp_path / "model")
    if name == INDEX:
        shard(tmp_path / "model", tensors, 2)
    path = tmp_path / "model" / name
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    round_trip(tmp_path / "model", tensors)
    for written in (tmp_path / "out").glob("*.json"):
        json.loads(written.read_bytes().decode("utf-8"))


def test_an_export_says_its_format_and_its_exact_size(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model")
    run("convert", tmp_path / "model", tmp_path / "store")
    run("export", tmp_path / "store", tmp_path / "out", "--max-shard-size", "10kB")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    for file in files:
        header, data = split_file(tmp_path / "out" / file)
        assert header.pop("__metadata__") == {"format": "pt"}
        assert {n for n, f in index["weight_map"].items() if f == file} == set(header)
        assert len(data) <= 10_000
