"""Other programs read a store, among them the one that the format's page prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import pytest
import torch

from tests.support.format_page import code_on_the_page, read_with_the_page
from tests.support.hf_cli import run
from tests.support.hf_folders import EMBEDDING, Tensors, bytes_of, make_llama, save

ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    """Return a model whose embedding has two chunks, the last one short."""
    tensors = make_llama(tmp_path / "model", vocab_size=33_000)
    save(tmp_path / "model", tensors | {ROTARY: torch.rand(5)})
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    drives = ("--drive", tmp_path / "a", "--drive", tmp_path / "b")
    run("convert", tmp_path / "model", tmp_path / "store", *drives)
    return tensors


@pytest.fixture
def store(tmp_path: Path, tensors: Tensors) -> Path:
    return tmp_path / "store"


def test_the_printed_reader_is_short() -> None:
    assert len([line for line in code_on_the_page("reader").splitlines() if line.strip()]) <= 30


def test_the_printed_reader_reads_the_source_bits(
    store: Path, tensors: Tensors, tmp_path: Path
) -> None:
    found = read_with_the_page(store, "weights", tmp_path)
    assert set(found) == {*tensors, ROTARY}
    for name, tensor in tensors.items():
        assert found[name].tobytes() == bytes_of(tensor), name


def test_the_printed_reader_reads_the_masters(
    store: Path, tensors: Tensors, tmp_path: Path
) -> None:
    found = read_with_the_page(store, "master", tmp_path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].tobytes() == bytes_of(tensor.float()), name


def test_moments_of_a_new_store_read_as_zeros(store: Path, tmp_path: Path) -> None:
    found = read_with_the_page(store, "exp_avg_sq", tmp_path)
    assert len(found) == 21
    assert not any(values.any() for values in found.values())


def test_zarr_with_the_printed_type_reads_the_exported_tensor(
    store: Path, tensors: Tensors, tmp_path: Path
) -> None:
    program = (
        f"import sys\n{code_on_the_page('zarr')}\n"
        "group = zarr.open_group(sys.argv[1], mode='r')\n"
        "weights = group['slots/0/outer_in.weights']\n"
        "master = group['slots/0/outer_in.master']\n"
        "print(weights.attrs['tensors'][0])\n"
        "open(sys.argv[2], 'wb').write(weights[:].tobytes())\n"
        "assert (weights[:].astype('f4') == master[:]).all()\n"
    )
    out = tmp_path / "weights"
    command = [sys.executable, "-I", "-c", program, str(store), str(out)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"'name': '{EMBEDDING}', 'shape': [33000, 32]" in shown
    assert out.read_bytes() == bytes_of(tensors[EMBEDDING])


def test_tensorstore_reads_the_exported_tensor(
    store: Path, tensors: Tensors, tmp_path: Path
) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    run("export", store, tmp_path / "out")
    path = os.fspath(store / "slots" / "0" / "outer_in.weights")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    values = tensorstore.open(spec).result().read().result()
    assert values.dtype == ml_dtypes.bfloat16
    assert values.tobytes() == bytes_of(tensors[EMBEDDING])
