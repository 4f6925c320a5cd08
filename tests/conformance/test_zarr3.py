from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.zarr_arrays import array_folder, packed_shard, read_with_zarr
from tiering.backends.zarr3 import Zarr3Backend
from tiering.codecs import Codec, ShardSpec
from tiering.records import ALIGNMENT
from tiering.testing import BackendConformance


def spec_of(nbytes: int, codec: Codec) -> ShardSpec:
    """Return a shard of ``nbytes`` in as many chunks, up to seven, as divide it."""
    chunks = next(count for count in (7, 5, 4, 3, 2, 1) if nbytes % count == 0)
    return ShardSpec(
        array="some.array",
        shard=0,
        codec=codec,
        itemsize=1,
        chunk_nbytes=nbytes // chunks,
        chunks=chunks,
        slots=chunks + 1,
    )


class Zarr3Conformance(BackendConformance):
    whole_files = True
    codec: ClassVar[Codec]

    @pytest.fixture(autouse=True)
    def _files(self) -> None:
        self.specs: dict[Path, ShardSpec] = {}
        self.backends: list[Zarr3Backend] = []

    def make_backend(self, folder: Path) -> Zarr3Backend:
        backend = Zarr3Backend("test", writable=True)
        backend.describe(folder / "absent", spec_of(ALIGNMENT, self.codec))
        for path, spec in self.specs.items():
            backend.describe(path, spec)
        self.backends.append(backend)
        return backend

    def make_file(self, folder: Path, content: bytes | memoryview, name: str = "file") -> Path:
        path = folder / name
        spec = self.specs[path] = spec_of(len(content), self.codec)
        path.write_bytes(packed_shard(spec, content))
        for backend in self.backends:
            backend.describe(path, spec)
        return path

    def content(self, path: Path) -> bytes:
        spec = self.specs[path]
        with tempfile.TemporaryDirectory() as folder:
            array = array_folder(
                Path(folder) / "array",
                dtype="uint8",
                length=spec.nbytes,
                spec=spec,
                shards=[path],
            )
            return read_with_zarr(array)


class TestNone(Zarr3Conformance):
    codec = Codec.NONE


class TestZstd(Zarr3Conformance):
    codec = Codec.ZSTD


class TestBloscLz4Bitshuffle(Zarr3Conformance):
    codec = Codec.BLOSC_LZ4_BITSHUFFLE


class TestBloscZstdShuffle(Zarr3Conformance):
    codec = Codec.BLOSC_ZSTD_SHUFFLE
