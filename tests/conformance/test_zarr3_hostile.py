"""Shards that are not what they should be: each is refused by name, none reads as zeros."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.zarr_arrays import ABSENT, packed_index, packed_shard
from tiering.backends.zarr3 import Zarr3Backend
from tiering.checksum import crc32c
from tiering.codecs import Codec, ShardSpec, encode_index
from tiering.errors import CorruptionError, MegatrainError, StorageError, UsageError

Pairs = list[tuple[int, int]]

codecs = pytest.mark.parametrize("codec", list(Codec))


def spec_of(codec: Codec, chunk_nbytes: int = 24) -> ShardSpec:
    return ShardSpec(
        array="some.array",
        shard=5,
        codec=codec,
        itemsize=2,
        chunk_nbytes=chunk_nbytes,
        chunks=2,
        slots=3,
    )


def content(spec: ShardSpec) -> bytes:
    return np.random.default_rng(1).bytes(spec.nbytes)


class Reader:
    """Reads a whole shard of any content, into a buffer that has a border."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self.path = path
        self.spec = spec
        self.backend = Zarr3Backend("test", writable=False, threads=1)
        self.backend.describe(path, spec)

    def read(self, file: bytes) -> bytes:
        self.path.unlink(missing_ok=True)  # truncating a file costs a flush on some file systems
        self.path.write_bytes(file)
        return self.read_what_is_there()

    def read_what_is_there(self) -> bytes:
        self.backend.forget(self.path)
        nbytes = self.spec.nbytes
        space = memoryview(bytearray(b"\xa5" * (nbytes + 128)))
        try:
            self.backend.read(self.path, 0, space[64 : 64 + nbytes]).result()
        finally:
            assert bytes(space[:64]) == bytes(space[64 + nbytes :]) == b"\xa5" * 64
        return bytes(space[64 : 64 + nbytes])

    def refusal(self, file: bytes | None = None) -> str:
        """Return what is said of ``file``, or of what is there, which must be refused."""
        with pytest.raises(CorruptionError) as caught:
            self.read_what_is_there() if file is None else self.read(file)
        message = str(caught.value)
        assert f"shard 5 of array some.array ({self.path})" in message
        return message


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Change one bit of a file, and change it back."""
    fd = os.open(path, os.O_RDWR)
    (byte,) = os.pread(fd, 1, bit // 8)
    os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)
    yield
    os.pwrite(fd, bytes([byte]), bit // 8)
    os.close(fd)


@pytest.fixture(name="reader_of")
def _reader_of(tmp_path: Path) -> Iterator[Callable[[ShardSpec], Reader]]:
    with ExitStack() as closed:

        def reader_of(spec: ShardSpec) -> Reader:
            reader = Reader(tmp_path / "shard", spec)
            closed.callback(reader.backend.close)
            return reader

        yield reader_of


@pytest.fixture(name="reader")
def _reader(reader_of: Callable[[ShardSpec], Reader], codec: Codec) -> Reader:
    return reader_of(spec_of(codec))


@codecs
def test_every_shorter_file_is_refused(reader: Reader) -> None:
    file = packed_shard(reader.spec, content(reader.spec))
    assert reader.read(file) == content(reader.spec)
    index_nbytes = reader.spec.index_nbytes
    for nbytes in reversed(range(len(file))):
        os.truncate(reader.path, nbytes)
        message = reader.refusal()
        assert ("is truncated" if nbytes < index_nbytes else "index at offset") in message


@codecs
def test_every_flipped_bit_is_refused(reader: Reader) -> None:
    file = bytearray(packed_shard(reader.spec, content(reader.spec)))
    data_nbytes = len(file) - reader.spec.index_nbytes
    first_nbytes = struct.unpack_from("<Q", file, data_nbytes + 8)[0]
    reader.path.write_bytes(file)
    for bit in range(8 * len(file)):
        with flipped(reader.path, bit):
            message = reader.refusal()
        if bit // 8 >= data_nbytes:
            assert f"index at offset {data_nbytes} is damaged" in message
        elif bit // 8 >= first_nbytes:
            assert f"chunk 1 at offset {first_nbytes} is damaged: crc32c" in message
        else:
            assert "chunk 0 at offset 0 is damaged: crc32c" in message


@codecs
@pytest.mark.parametrize("nbytes", [0, 1, 52, 500])
def test_zeros_are_no_shard(reader: Reader, nbytes: int) -> None:
    reader.refusal(bytes(nbytes))


@codecs
def test_a_missing_file_is_told_by_name(reader: Reader) -> None:
    with pytest.raises(StorageError, match="No such file") as caught:
        reader.read_what_is_there()
    assert str(reader.path) in str(caught.value)
    assert "shard 5 of array some.array, chunk 0" in str(caught.value)
    assert not reader.path.exists()


@codecs
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: [p[0], (1 << 40, p[1][1]), p[2]], "chunk 1 begins at 1099511627776"),
        (lambda p: [p[0], (0, p[1][1]), p[2]], "chunk 1 begins at 0, the one before it ends"),
        (lambda p: [p[1], p[0], p[2]], "chunk 0 begins at"),
        (lambda p: [p[0], (p[1][0], p[1][1] - 1), p[2]], "its chunks end at"),
        (lambda p: [p[0], (p[1][0], p[1][1] + 1), p[2]], "its chunks end at|can have"),
        (lambda p: [p[0], (p[1][0], ABSENT), p[2]], "it can have"),
        (lambda p: [p[0], (ABSENT, p[1][1]), p[2]], "chunk 1 begins at"),
        (lambda p: [p[0], (p[1][0], 4), p[2]], "it can have"),
        (lambda p: [p[0], (p[1][0], 1 << 40), p[2]], "it can have"),
        (lambda p: [p[0], (ABSENT, ABSENT), p[2]], "its chunks end at"),
        (lambda p: [(ABSENT, ABSENT)] * 3, "its chunks end at 0"),
        (lambda p: [p[0], p[1], (sum(p[1]), 0)], "chunk 2 is present in a shard of 2"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(
    reader: Reader, change: Callable[[Pairs], Pairs], said: str
) -> None:
    file = packed_shard(reader.spec, content(reader.spec))
    index = file[-reader.spec.index_nbytes : -4]
    pairs = list(struct.iter_unpack("<QQ", index))
    hostile = file[: -reader.spec.index_nbytes] + packed_index(change(pairs))
    assert hostile != file
    message = reader.refusal(hostile)
    assert any(part in message for part in said.split("|")), message


def with_valid_sums(spec: ShardSpec, *encoded: bytes) -> bytes:
    """Return a shard whose sums are right, whatever its chunks are."""
    parts = [chunk + struct.pack("<I", crc32c(chunk)) for chunk in encoded]
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    places = list(zip(ends, map(len, parts), strict=False))
    return b"".join(parts) + encode_index(spec, places)


compressing = pytest.mark.parametrize("codec", [codec for codec in Codec if codec != Codec.NONE])


@compressing
@pytest.mark.parametrize("nbytes", [16_385, 20_000, 1 << 20])
def test_a_chunk_that_decodes_to_more_is_refused_before_it_does(
    reader_of: Callable[[ShardSpec], Reader], codec: Codec, nbytes: int
) -> None:
    spec = spec_of(codec, chunk_nbytes=16_384)
    reader = reader_of(spec)
    good = bytes(codec.compress(memoryview(content(spec))[: spec.chunk_nbytes], 2))
    bomb = bytes(codec.compress(memoryview(bytes(nbytes)), 1))
    message = reader.refusal(with_valid_sums(spec, good, bomb))
    assert f"decodes to {nbytes} B instead of 16384 B" in message


@compressing
def test_a_chunk_that_lies_about_what_it_decodes_to_is_refused(reader: Reader) -> None:
    spec = reader.spec
    good = bytes(spec.codec.compress(memoryview(content(spec))[:24], 2))
    bomb = bytearray(spec.codec.compress(memoryview(bytes(200)), 1))
    bomb[bomb.index(200)] = 24
    assert "chunk 1" in reader.refusal(with_valid_sums(spec, good, bytes(bomb)))


@compressing
def test_a_chunk_cut_short_is_refused_although_its_sum_is_right(reader: Reader) -> None:
    spec = reader.spec
    good = bytes(spec.codec.compress(memoryview(content(spec))[:24], 2))
    for nbytes in range(1, len(good)):
        assert "chunk 1" in reader.refusal(with_valid_sums(spec, good, good[:nbytes]))


@codecs
def test_only_what_is_read_is_judged_and_the_rest_stays_readable(reader: Reader) -> None:
    spec = reader.spec
    file = bytearray(packed_shard(spec, content(spec)))
    file[0] ^= 1
    reader.path.write_bytes(file)
    out = memoryview(bytearray(10))
    reader.backend.read(reader.path, 30, out).result()
    assert out == content(spec)[30:40]
    for _ in range(2):  # what failed once is not taken from memory afterwards
        with pytest.raises(CorruptionError, match="chunk 0 at offset 0"):
            reader.backend.read(reader.path, 20, out).result()


@codecs
def test_a_file_cut_while_it_is_open_ends_early(
    reader_of: Callable[[ShardSpec], Reader], codec: Codec
) -> None:
    spec = spec_of(codec, chunk_nbytes=4096)
    reader = reader_of(spec)
    file = packed_shard(spec, content(spec))
    reader.path.write_bytes(file)
    out = memoryview(bytearray(4096))
    reader.backend.read(reader.path, 0, out).result()
    with reader.path.open("r+b") as opened:
        opened.truncate(len(file) // 2)
    with pytest.raises(StorageError, match=r"ended early.*chunk 1, offset") as caught:
        reader.backend.read(reader.path, 4096, out).result()
    assert (caught.value.offset, caught.value.wanted) == (4096, 4096)


def test_an_unknown_codec_is_refused_with_what_was_probably_meant() -> None:
    with pytest.raises(UsageError, match="did you mean 'blosc-zstd-shuffle'") as caught:
        Codec.named("blosc-zstd-suffle")
    assert all(codec.value in str(caught.value) for codec in Codec)
    with pytest.raises(UsageError, match=r"no codec 'q' \(codecs: none, zstd") as caught:
        Codec.named("q")
    assert isinstance(caught.value, MegatrainError)
    assert [Codec.named(codec.value) for codec in Codec] == list(Codec)


@pytest.mark.parametrize(
    "wrong", [{"chunks": 0}, {"chunks": 4}, {"chunk_nbytes": 0}, {"chunk_nbytes": 25}]
)
def test_a_shard_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    fields = {"chunks": 2, "slots": 3, "itemsize": 2, "chunk_nbytes": 24, **wrong}
    with pytest.raises(ValueError, match="shard 0 of array a"):
        ShardSpec(array="a", shard=0, codec=Codec.NONE, **fields)
