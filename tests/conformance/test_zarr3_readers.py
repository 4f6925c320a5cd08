from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.support.zarr_arrays import array_folder, read_with_tensorstore, read_with_zarr
from tiering.backends.zarr3 import Zarr3Backend
from tiering.backends.zarr_bfloat16 import register_bfloat16
from tiering.codecs import Codec, ShardSpec, empty_shard, encoded_bounds

CHUNK_LENGTH = 1001
SLOTS = 3
LENGTHS = (1, CHUNK_LENGTH, 7 * CHUNK_LENGTH + 13)  # the last: three shards, one of them short
ITEMSIZE = {"bfloat16": 2, "float32": 4, "int8": 1, "bool": 1}
READERS = (read_with_zarr, read_with_tensorstore)

dtypes = pytest.mark.parametrize("dtype", ITEMSIZE)
lengths = pytest.mark.parametrize("length", LENGTHS)
codecs = pytest.mark.parametrize("codec", list(Codec))


def specs_of(dtype: str, length: int, codec: Codec) -> list[ShardSpec]:
    count = -(-length // CHUNK_LENGTH)
    return [
        ShardSpec(
            array=f"some.{dtype}",
            shard=first // SLOTS,
            codec=codec,
            itemsize=ITEMSIZE[dtype],
            chunk_nbytes=CHUNK_LENGTH * ITEMSIZE[dtype],
            chunks=min(SLOTS, count - first),
            slots=SLOTS,
        )
        for first in range(0, count, SLOTS)
    ]


def content(dtype: str, length: int) -> bytes:
    """Return values of every kind, NaN and negative zero too, and one chunk of zeros."""
    data = np.random.default_rng(length).integers(0, 256, length * ITEMSIZE[dtype], np.uint8)
    if dtype == "bool":
        data %= 2
    chunk_nbytes = CHUNK_LENGTH * ITEMSIZE[dtype]
    data[chunk_nbytes : 2 * chunk_nbytes] = 0
    return data.tobytes()


def write(backend: Zarr3Backend, paths: list[Path], specs: list[ShardSpec], data: bytes) -> None:
    """Write an array in pieces that end nowhere in particular."""
    data = data.ljust(sum(spec.nbytes for spec in specs), b"\0")
    for path, spec in zip(paths, specs, strict=True):
        path.write_bytes(empty_shard(spec))
        backend.describe(path, spec)
        shard, data = data[: spec.nbytes], data[spec.nbytes :]
        pieces = range(0, len(shard), 1500)
        for future in [backend.write(path, at, memoryview(shard[at : at + 1500])) for at in pieces]:
            future.result()


@dtypes
@lengths
@codecs
def test_other_readers_read_what_we_write(
    tmp_path: Path, dtype: str, length: int, codec: Codec
) -> None:
    specs = specs_of(dtype, length, codec)
    paths = [tmp_path / f"shard{spec.shard}" for spec in specs]
    backend = Zarr3Backend("test", writable=True)
    data = content(dtype, length)
    write(backend, paths, specs, data)
    backend.close()
    for path, spec in zip(paths, specs, strict=True):
        low, high = encoded_bounds(spec)
        assert low < path.stat().st_size <= high
    folder = array_folder(
        tmp_path / "array", dtype=dtype, length=length, spec=specs[0], shards=paths
    )
    for reader in READERS:
        assert reader(folder) == data


def write_with_zarr(folder: Path, values: np.ndarray) -> None:
    import zarr

    register_bfloat16()
    zarr.open_array(folder, mode="r+")[:] = values


def write_with_tensorstore(folder: Path, values: np.ndarray) -> None:
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}
    tensorstore.open(spec, open=True).result().write(values).result()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN == NaN
@pytest.mark.parametrize("writer", [write_with_zarr, write_with_tensorstore])
@codecs
def test_we_read_what_other_writers_write(
    tmp_path: Path, codec: Codec, writer: Callable[[Path, np.ndarray], None]
) -> None:
    length = LENGTHS[-1]
    data = content("bfloat16", length)
    specs = specs_of("bfloat16", length, codec)
    folder = array_folder(
        tmp_path / "array", dtype="bfloat16", length=length, spec=specs[0], shards=[]
    )
    writer(folder, np.frombuffer(data, ml_dtypes.bfloat16))
    backend = Zarr3Backend("test", writable=False)
    found = bytearray()
    for spec in specs:
        path, out = folder / "c" / str(spec.shard), bytearray(spec.nbytes)
        backend.describe(path, spec)
        backend.read(path, 0, memoryview(out)).result()
        found += out
    backend.close()
    assert found[: len(data)] == data
    assert not any(found[len(data) :])


@codecs
def test_a_new_shard_reads_as_zeros_everywhere(tmp_path: Path, codec: Codec) -> None:
    [spec] = specs_of("float32", 2 * CHUNK_LENGTH + 1, codec)
    path = tmp_path / "shard"
    path.write_bytes(empty_shard(spec))
    assert path.stat().st_size == encoded_bounds(spec)[0]
    folder = array_folder(
        tmp_path / "array", dtype="float32", length=2 * CHUNK_LENGTH + 1, spec=spec, shards=[path]
    )
    out = memoryview(bytearray(b"\x07" * spec.nbytes))
    backend = Zarr3Backend("test", writable=False)
    backend.describe(path, spec)
    assert backend.read(path, 0, out).result() == spec.nbytes
    backend.close()
    assert not any(out)
    for reader in READERS:
        assert not any(reader(folder))


@codecs
def test_a_shard_of_zeros_takes_no_more_room_than_a_new_one(tmp_path: Path, codec: Codec) -> None:
    [spec] = specs_of("float32", 3 * CHUNK_LENGTH, codec)
    path = tmp_path / "shard"
    backend = Zarr3Backend("test", writable=True)
    write(backend, [path], [spec], bytes(spec.nbytes))
    backend.close()
    assert path.read_bytes() == empty_shard(spec)
