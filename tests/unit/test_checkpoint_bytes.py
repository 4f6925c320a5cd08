"""Bytes that no tensor shows: gaps, pads, and comparisons that go on after the first piece."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from checkpoint.checked import read_schema
from checkpoint.formats import hf
from checkpoint.formats.files import RangeReader
from checkpoint.formats.safetensors import TensorInfo
from tests.support.hf_cli import run
from tests.support.hf_folders import make_llama, save
from tiering.errors import StorageError
from tiering.store import open_reader


def test_what_lies_between_tensors_is_zero(tmp_path: Path) -> None:
    tensors = make_llama(tmp_path / "model", vocab_size=97, hidden_size=30, head_dim=10,
                         num_attention_heads=3, num_key_value_heads=1)  # fmt: skip
    save(tmp_path / "model", {name: tensor.fill_(3) for name, tensor in tensors.items()})
    run("convert", tmp_path / "model", tmp_path / "store", "--ram", "64KiB")
    gaps = 0
    with open_reader(tmp_path / "store") as reader:
        schema = read_schema(reader)
        for record in schema.records():
            data = bytearray(record.padded_nbytes)
            reader.read(record.name, 0, memoryview(data))
            used = np.zeros(record.length, bool)
            for tensor in schema.unit(record.attributes["unit"]).tensors:
                used[tensor.offset : tensor.end] = True
            elements = np.frombuffer(data, f"u{record.itemsize}")
            moment = record.name.endswith(("exp_avg", "exp_avg_sq"))
            assert not elements[: record.length][~used].any()
            assert not elements[record.length :].any()
            assert (elements[: record.length][used] != 0).all() == (not moment)
            gaps += int((~used).sum())
    assert gaps


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 640, 1000])
def test_bytes_are_compared_to_their_end(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "COMPARE_NBYTES", 64)
    data = os.urandom(length)
    (tmp_path / "a").write_bytes(b"front" + data)
    (tmp_path / "b").write_bytes(data)
    left = TensorInfo(name="a", dtype="U8", shape=(length,), file="a", start=5, end=5 + length)
    right = TensorInfo(name="b", dtype="U8", shape=(length,), file="b", start=0, end=length)
    with RangeReader() as reader:
        assert hf.equal_bytes(reader, (tmp_path / "a", left), (tmp_path / "b", right))
    for place in {0, length // 2, length - 1} - {-1} if length else set():
        changed = bytearray(data)
        changed[place] ^= 1
        (tmp_path / "b").write_bytes(changed)
        with RangeReader() as reader:
            assert not hf.equal_bytes(reader, (tmp_path / "a", left), (tmp_path / "b", right))


def test_a_file_that_ends_early_is_an_error_with_offset_and_lengths(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    with RangeReader() as reader, pytest.raises(StorageError) as caught:
        reader.read(tmp_path / "a", 6, memoryview(bytearray(8)))
    assert (caught.value.offset, caught.value.wanted, caught.value.moved) == (6, 8, 4)


def test_many_files_are_read_with_few_open(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / str(i)).write_bytes(bytes([i]))
    before = len(os.listdir("/proc/self/fd"))
    with RangeReader() as reader:
        for i in (*range(40), *range(40)):
            out = bytearray(1)
            reader.read(tmp_path / str(i), 0, memoryview(out))
            assert out[0] == i
        assert len(os.listdir("/proc/self/fd")) < before + 20
