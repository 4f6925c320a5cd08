"""A store of format 1, made once: every later version reads it byte for byte."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoint.checked import CheckedReader, read_schema
from checkpoint.schema import Schema
from checkpoint.verify import verify
from megatrain.train_state import TrainState
from tests.support.format_page import (
    code_on_the_page,
    fault_of_the_page,
    read_with_the_page,
)
from tests.support.golden import (
    RETAIN,
    SCHEMA,
    SIDE_FILES,
    STORE,
    TRAINED,
    content,
    records,
    train_state,
)
from tests.support.hf_cli import run
from tests.support.tiering_stores import put
from tiering.generations import read_root
from tiering.store import StoreReader, open_reader, open_writer

NEWEST = 3
DIGEST = "8503a4b446b05631157c42b6775ee75414eb03452e74d5aa0488afd7574e92b5"


def everything(store: Path) -> str:
    """Return a sha256 over every name, content and link."""
    whole = hashlib.sha256()
    for path in sorted(store.rglob("*")):
        if path.is_symlink():
            whole.update(f"{path.relative_to(store)} -> {os.readlink(path)}\n".encode())
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{path.relative_to(store)} {content}\n".encode())
    return whole.hexdigest()


def test_the_store_in_git_is_the_one_that_was_made():
    assert everything(STORE) == DIGEST
    nbytes = sum(p.lstat().st_size for p in STORE.rglob("*") if not p.is_dir() or p.is_symlink())
    assert nbytes < 200_000


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A copy: opening a store takes locks in it."""
    shutil.copytree(STORE, tmp_path / "store", symlinks=True)
    return tmp_path / "store"


def assert_all(reader: StoreReader, generation: int) -> None:
    checked = CheckedReader(reader)
    assert list(reader.records) == [record.name for record in records()]
    for wanted in records():
        found = reader.records[wanted.name]
        assert found == wanted
        assert found.attributes == wanted.attributes
        data = b"".join(bytes(piece) for piece in checked.read(found, 0, found.nbytes))
        assert data == content(wanted, generation).tobytes(), wanted.name


@pytest.mark.parametrize("generation", [2, NEWEST])
def test_our_reader_reads_every_kept_generation(store, generation):
    with open_reader(store, generation=generation) as reader:
        assert_all(reader, generation)
        assert read_schema(reader) == SCHEMA == Schema.decode(SCHEMA.encode())
        assert {name: reader.schema_file(name) for name in SIDE_FILES} == SIDE_FILES
        found = TrainState.decode(reader.manifest.train_state, TRAINED)
        assert found == train_state(generation)
        assert reader.manifest.step == found.step


def test_nothing_is_wrong_with_it(store):
    assert verify(store, deep=True).findings == ()
    run("export", store, store.parent / "out")
    run("inspect", store)


def test_it_goes_on_being_written(store):
    with open_writer(store) as writer:
        writer.ensure_slots(RETAIN + 1)
        slot = writer.begin(wait_s=0)
        checksums = {
            record.name: put(writer, slot, record, content(record, 4).view(np.uint8))
            for record in writer.records.values()
            if not record.shared
        }
        state = train_state(4).encode()
        writer.commit(step=40, train_state=state, checksums=checksums, retain=RETAIN)
    assert verify(store, deep=True).findings == ()
    with open_reader(store, generation=NEWEST) as reader:
        assert_all(reader, NEWEST)
    with open_reader(store) as reader:
        assert_all(reader, 4)


@pytest.mark.parametrize("role", ["weights", "master", "exp_avg", "exp_avg_sq"])
def test_the_printed_reader_reads_it(tmp_path, role):
    found = read_with_the_page(STORE, role, tmp_path)
    wanted = {
        tensor.name: content(record, NEWEST)[tensor.offset : tensor.end].tobytes()
        for record in records()
        if record.name.endswith(f".{role}")
        for tensor in SCHEMA.unit(record.name.rpartition(".")[0]).tensors
    }
    assert {name: values.tobytes() for name, values in found.items()} == wanted


def test_the_printed_comparison_of_checksums_finds_a_flipped_bit(store):
    assert not fault_of_the_page(store)
    root = read_root(store)
    shard = store / "slots" / str(root.latest.slot) / "layer.000.exp_avg" / "c" / "0"
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    assert fault_of_the_page(store).endswith("layer.000.exp_avg: chunk 0\n")


@pytest.mark.parametrize("slot", [1, 2])
def test_zarr_reads_every_array(tmp_path, slot):
    program = (
        f"import sys\n{code_on_the_page('zarr')}\n"
        "group = zarr.open_group(sys.argv[1], mode='r')\n"
        "found = {name: array[:].view('u1') for name, array in group.arrays()}\n"
        "np.savez(sys.argv[2], **found)\n"
    )
    command = [sys.executable, "-I", "-c", program, str(STORE / "slots" / str(slot)), "found.npz"]
    subprocess.run(command, check=True, cwd=tmp_path)
    found = dict(np.load(tmp_path / "found.npz"))
    assert found.keys() == {record.name for record in records()}
    for record in records():
        generation = {1: 2, 2: NEWEST}[slot]
        assert found[record.name].tobytes() == content(record, generation).tobytes(), record.name


def test_tensorstore_reads_every_array():
    tensorstore = pytest.importorskip("tensorstore")
    for record in records():
        path = os.fspath(STORE / "slots" / "2" / record.name)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        values = tensorstore.open(spec).result().read().result()
        assert values.dtype == (
            ml_dtypes.bfloat16 if record.dtype == "bfloat16" else np.dtype(record.dtype)
        )
        assert values.tobytes() == content(record, NEWEST).tobytes(), record.name
