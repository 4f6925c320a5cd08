from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiering_stores import (
    content,
    equal_rates,
    make_store,
    small_chunks,
    small_record,
)
from tiering.backends.zarr_bfloat16 import open_array, register_bfloat16
from tiering.codecs import Codec
from tiering.records import Record
from tiering.store import create_store, open_writer

RECORDS = (
    *(
        small_record(f"some.{dtype}", dtype, 3 * 4096 * 8 + 1001)
        for dtype in ("bfloat16", "float32", "float16", "int64", "uint8", "bool")
    ),
    small_record("full", "float32", 8 * 4096),
    small_record("one", "bfloat16", 1),
    small_record("hole", "bfloat16", 5 * 4096 + 3),
    small_record("carried", "float32", 4097, shared=True),
    *(
        small_record(f"{codec}.{dtype}", dtype, 3 * 4096 * 8 + 1001, codec=str(codec))
        for codec in Codec
        for dtype in ("bfloat16", "float32", "bool")
    ),
    small_record("one.encoded", "bfloat16", 1, codec="zstd"),
    small_record("hole.encoded", "float32", 5 * 4096 + 3, codec="zstd"),
    small_record("carried.encoded", "float32", 4097, shared=True, codec="none"),
)


@pytest.fixture(name="store", scope="module")
def _store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("interop")
    drives = [folder / "a", folder / "b"]
    for drive in drives:
        drive.mkdir()
    with small_chunks():
        store = folder / "store"
        with create_store(
            store, records=RECORDS, schema_files={}, drives=drives, measure=equal_rates
        ) as writer:
            for record in RECORDS:
                if not record.name.startswith("hole"):
                    data = _expected(record)
                    writer.write(0, record.name, 0, memoryview(data))
            checksums = {r.name: np.zeros(r.geometry.chunk_count, np.uint32) for r in RECORDS}
            writer.commit(step=0, train_state={}, checksums=checksums)
        with open_writer(store) as writer:
            writer.ensure_slots(2)
        yield store


def _expected(record: Record) -> np.ndarray:
    if record.name.startswith("hole"):
        return np.zeros(record.nbytes, np.uint8)
    data = content(record, seed=5)
    return data % 2 if record.dtype == "bool" else data


def _tensorstore(store: Path, slot: int, name: str) -> Any:
    tensorstore = pytest.importorskip("tensorstore")
    path = store / "slots" / str(slot) / name
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return tensorstore.open(spec, open=True, read=True).result()


def _bytes_of(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("name", [record.name for record in RECORDS])
def test_zarr_python_reads_what_was_written(store: Path, name: str) -> None:
    record = next(r for r in RECORDS if r.name == name)
    array = open_array(store, 0, name)
    assert array.shape == (record.length,)
    np.testing.assert_array_equal(_bytes_of(array[:]), _expected(record))
    tail = _bytes_of(array[max(0, record.length - 7) :])
    np.testing.assert_array_equal(tail, _expected(record)[-len(tail) :])


@pytest.mark.parametrize("name", [record.name for record in RECORDS])
def test_tensorstore_reads_what_was_written(store: Path, name: str) -> None:
    record = next(r for r in RECORDS if r.name == name)
    array = _tensorstore(store, 0, name)
    assert array.shape == (record.length,)
    np.testing.assert_array_equal(_bytes_of(array.read().result()), _expected(record))


def test_a_slot_that_was_never_written_reads_as_zeros(store: Path) -> None:
    for record in RECORDS:
        expected = _expected(record) if record.shared else np.zeros(record.nbytes, np.uint8)
        np.testing.assert_array_equal(_bytes_of(open_array(store, 1, record.name)[:]), expected)
        array = _tensorstore(store, 1, record.name)
        np.testing.assert_array_equal(_bytes_of(array.read().result()), expected)


def test_a_store_is_a_group_of_groups_of_arrays(store: Path) -> None:
    zarr = pytest.importorskip("zarr")
    register_bfloat16()
    root = zarr.open_group(store, mode="r")
    assert root.attrs["megatrain"]["generation"] == 1
    assert sorted(root["slots"].group_keys()) == ["0", "1"]
    assert sorted(root["slots/0"].array_keys()) == sorted(r.name for r in RECORDS)


def test_shards_lie_on_both_drives_and_slots_of_a_shard_on_one(store: Path) -> None:
    places, nbytes = {}, {"0": 0, "1": 0}
    for slot in (0, 1):
        links = sorted((store / "slots" / str(slot)).glob("*/c/*"), key=str)
        places[slot] = [str(link.readlink()).split("/")[-2] for link in links]
        for link, drive in zip(links, places[slot], strict=True):
            nbytes[drive] += link.stat().st_size
    assert places[0] == places[1]
    assert nbytes["0"] == pytest.approx(nbytes["1"], rel=0.1)


def test_the_metadata_is_plain_and_names_its_codecs(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", records=(small_record("a", "bfloat16", 9),))
    document = json.loads((store / "slots/0/a/zarr.json").read_text())
    assert document["data_type"] == "bfloat16"
    [codec] = document["codecs"]
    assert codec["name"] == "sharding_indexed"
    assert codec["configuration"]["index_location"] == "end"
    assert codec["configuration"]["chunk_shape"] == [2048]
