from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.faults import Fault, FaultConformance, Other
from tests.support.zarr_arrays import array_folder, packed_shard, read_with_zarr
from tiering.backends.zarr3 import Zarr3Backend
from tiering.codecs import Codec, ShardSpec
from tiering.records import ALIGNMENT
from tiering.testing import aligned_buffer


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


class Zarr3Conformance(FaultConformance):
    """The suite. What a file is lies beside it, so that another process can be told, too."""

    whole_files = True
    codec: ClassVar[Codec]

    @pytest.fixture(autouse=True)
    def _backends(self) -> None:
        self.backends: list[Zarr3Backend] = []

    def make_backend(self, folder: Path) -> Zarr3Backend:
        backend = Zarr3Backend("test", writable=True)
        backend.describe(folder / "absent", spec_of(ALIGNMENT, self.codec))
        for path in folder.glob("*.spec"):
            backend.describe(path.with_suffix(""), self._spec(path.with_suffix("")))
        self.__dict__.setdefault("backends", []).append(backend)
        return backend

    def _spec(self, path: Path) -> ShardSpec:
        return spec_of(int(path.with_name(f"{path.name}.spec").read_text()), self.codec)

    def make_file(self, folder: Path, content: bytes | memoryview, name: str = "file") -> Path:
        path = folder / name
        spec = spec_of(len(content), self.codec)
        (folder / f"{name}.spec").write_text(str(len(content)))
        path.write_bytes(packed_shard(spec, content))
        for backend in self.backends:
            backend.describe(path, spec)
        return path

    def content(self, path: Path) -> bytes:
        spec = self._spec(path)
        with tempfile.TemporaryDirectory() as folder:
            array = array_folder(
                Path(folder) / "array",
                dtype="uint8",
                length=spec.nbytes,
                spec=spec,
                shards=[path],
            )
            return read_with_zarr(array)

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
    @pytest.mark.parametrize("op", ["read", "write"])
    def test_an_error_after_a_short_transfer_tells_how_far_it_came(
        self, folder: Path, other: Other, op: str, code: int
    ) -> None:
        before = aligned_buffer(9 * ALIGNMENT, seed=2)
        path = self.make_file(folder, before, "victim")
        fault = Fault(op=op, path="victim", after=2, errno=code)
        outcome = other.transfer(path, op, 0, len(before), fault)
        assert (outcome["errno"], outcome["path"]) == (code, str(path))
        assert (outcome["wanted"], outcome["offset"]) == (len(before), outcome["moved"])
        if op == "write":
            assert outcome["moved"] == 2 * self._spec(path).chunk_nbytes
        assert self.content(path) == before
        assert not list(folder.glob("*.unfinished"))


class TestNone(Zarr3Conformance):
    codec = Codec.NONE


class TestZstd(Zarr3Conformance):
    codec = Codec.ZSTD


class TestBloscLz4Bitshuffle(Zarr3Conformance):
    codec = Codec.BLOSC_LZ4_BITSHUFFLE


class TestBloscZstdShuffle(Zarr3Conformance):
    codec = Codec.BLOSC_ZSTD_SHUFFLE
