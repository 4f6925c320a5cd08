"""How the chunks of a shard are encoded, by name, and the index that finds them. Pure.

A shard is a file of encoded chunks, one after another, and an index of (offset, length) pairs with
a crc32c at its end: the ``sharding_indexed`` codec of Zarr v3. Every encoded chunk ends with the
crc32c of what precedes it. A chunk that is marked absent is all zeros.
"""

from __future__ import annotations

import difflib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from tiering.checksum import Buffer, crc32c
from tiering.errors import CorruptionError, UsageError
from tiering.records import Record

CRC_NBYTES = 4
BLOCK_NBYTES = 1 << 20  # of blosc: zstd gains nothing from byte planes shorter than its own blocks

_ABSENT = (1 << 64) - 1
_BLOSC_OVERHEAD = 16
_ZSTD_MAGIC = 0xFD2FB528

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
Place = tuple[int, int]  # offset and length of an encoded chunk, crc32c included
JSON = dict[str, Any]


class Codec(StrEnum):
    """What compresses a chunk. Each keeps every bit; all are read by other Zarr v3 readers."""

    NONE = "none"
    ZSTD = "zstd"
    BLOSC_LZ4_BITSHUFFLE = "blosc-lz4-bitshuffle"
    BLOSC_ZSTD_SHUFFLE = "blosc-zstd-shuffle"

    @classmethod
    def named(cls, name: str) -> Codec:
        """Return the codec called ``name``.

        Raises:
            UsageError: There is none.
        """
        names = [codec.value for codec in cls]
        if name in names:
            return cls(name)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"no codec {name!r}{hint} (codecs: {', '.join(names)})")

    def document(self, itemsize: int) -> list[JSON]:
        """Return the compressor's part of the metadata of an array; empty for ``none``."""
        if self is Codec.NONE:
            return []
        if self is Codec.ZSTD:
            return [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
        configuration = {
            "typesize": itemsize,
            "cname": self._compressor,
            "clevel": 1,
            "shuffle": self._shuffle,
            "blocksize": BLOCK_NBYTES,
        }
        return [{"name": "blosc", "configuration": configuration}]

    @property
    def _compressor(self) -> str:
        return self.value.split("-")[1]

    @property
    def _shuffle(self) -> str:
        return self.value.split("-")[2]

    def max_nbytes(self, nbytes: int) -> int:
        """Return the most that ``nbytes`` can become, without the crc32c."""
        if self is Codec.NONE:
            return nbytes
        if self is Codec.ZSTD:  # ZSTD_COMPRESSBOUND of zstd.h
            return nbytes + (nbytes >> 8) + max(0, ((128 << 10) - nbytes) >> 11)
        return nbytes + _BLOSC_OVERHEAD

    def compress(self, data: memoryview, itemsize: int) -> Buffer:
        """Return ``data`` compressed, without its crc32c; ``none`` returns ``data`` itself."""
        if self is Codec.NONE:
            return data
        encoded: bytes = _coder(self, itemsize).encode(data)
        return encoded

    def decompress(self, data: memoryview, out: memoryview) -> None:
        """Fill ``out`` with what ``data`` decodes to; no byte is written beyond ``out``.

        Raises:
            ValueError: ``data`` was not encoded so or decodes to another length; ``out`` is
                undefined.
        """
        if self is Codec.NONE:
            _require(len(data), out)
            out[:] = data
            return
        _require(_decoded_nbytes(self, data), out)
        try:
            _coder(self, 1).decode(data, out)
        except RuntimeError as error:
            raise ValueError(str(error)) from error


@lru_cache(maxsize=64)
def _coder(codec: Codec, itemsize: int) -> Any:
    from numcodecs import blosc, zstd

    if codec is Codec.ZSTD:
        return zstd.Zstd(level=1)
    shuffle = {"shuffle": blosc.SHUFFLE, "bitshuffle": blosc.BITSHUFFLE}[codec._shuffle]
    return blosc.Blosc(codec._compressor, 1, shuffle, BLOCK_NBYTES, typesize=itemsize)


def _require(nbytes: int, out: memoryview) -> None:
    if nbytes != len(out):
        raise ValueError(f"decodes to {nbytes} B instead of {len(out)} B")


def _decoded_nbytes(codec: Codec, data: memoryview) -> int:
    """Return the length that the header of ``data`` announces.

    The libraries take headers at their word: blosc would read as many bytes as its header says,
    and both are content to fill only a part of the output.
    """
    try:
        return _zstd_nbytes(data) if codec is Codec.ZSTD else _blosc_nbytes(data)
    except struct.error as error:
        raise ValueError(f"{len(data)} B are too few for a header") from error


def _blosc_nbytes(data: memoryview) -> int:
    nbytes, _, encoded_nbytes = struct.unpack_from("<III", data, 4)
    if encoded_nbytes != len(data):
        raise ValueError(f"{encoded_nbytes} B were encoded, {len(data)} B are here")
    return int(nbytes)


def _zstd_nbytes(data: memoryview) -> int:
    """Return the content size of a zstd frame (RFC 8878, section 3.1.1.1)."""
    magic, descriptor = struct.unpack_from("<IB", data)
    if magic != _ZSTD_MAGIC:
        raise ValueError("no zstd frame")
    kind, single = descriptor >> 6, descriptor >> 5 & 1
    at = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    if kind == 0 and not single:
        raise ValueError("a zstd frame without its content size")
    (nbytes,) = struct.unpack_from(("<B", "<H", "<I", "<Q")[kind], data, at)
    return int(nbytes) + (256 if kind == 1 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """What a shard file holds: ``chunks`` full chunks, and an index with room for ``slots``.

    ``array`` and ``shard`` name it in messages. ``chunk_nbytes`` counts decoded bytes.
    """

    array: str
    shard: int
    codec: Codec
    itemsize: int
    chunk_nbytes: int
    chunks: int
    slots: int

    def __post_init__(self) -> None:
        if not 1 <= self.chunks <= self.slots:
            raise ValueError(f"{self.name}: {self.chunks} chunks in an index for {self.slots}")
        if self.chunk_nbytes < 1 or self.chunk_nbytes % self.itemsize:
            raise ValueError(
                f"{self.name}: a chunk of {self.chunk_nbytes} B is no positive multiple "
                f"of {self.itemsize}"
            )

    @property
    def name(self) -> str:
        """Which shard this is, for messages."""
        return f"shard {self.shard} of array {self.array}"

    @property
    def nbytes(self) -> int:
        """Decoded bytes of all chunks."""
        return self.chunks * self.chunk_nbytes

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index with its crc32c."""
        return 16 * self.slots + CRC_NBYTES

    @property
    def max_encoded_nbytes(self) -> int:
        """The most that an encoded chunk can take, crc32c included."""
        return self.codec.max_nbytes(self.chunk_nbytes) + CRC_NBYTES


def shard_spec(record: Record, shard: int) -> ShardSpec:
    """Return what the file of ``shard`` of a record that has a codec holds."""
    geometry = record.geometry
    return ShardSpec(
        array=record.name,
        shard=shard,
        codec=Codec.named(record.codec or ""),
        itemsize=record.itemsize,
        chunk_nbytes=geometry.chunk_nbytes,
        chunks=geometry.chunks_in(shard),
        slots=geometry.chunks_per_shard,
    )


def inner_codecs(itemsize: int, codec: Codec) -> list[JSON]:
    """Return the ``codecs`` of the sharding codec of an array: what is done to each chunk."""
    return [LITTLE, *codec.document(itemsize), {"name": "crc32c"}]


def empty_shard(spec: ShardSpec) -> bytes:
    """Return the file of a shard that reads as zeros: an index in which every chunk is absent."""
    return encode_index(spec, [None] * spec.chunks)


def encoded_bounds(spec: ShardSpec) -> tuple[int, int]:
    """Return the shortest and the longest that the file can be."""
    return spec.index_nbytes, spec.chunks * spec.max_encoded_nbytes + spec.index_nbytes


def encode_index(spec: ShardSpec, places: Sequence[Place | None]) -> bytes:
    """Return the index of a shard whose chunks lie at ``places``."""
    absent = (_ABSENT, _ABSENT)
    pairs = [place or absent for place in places] + [absent] * (spec.slots - len(places))
    data = b"".join(struct.pack("<QQ", *pair) for pair in pairs)
    return data + struct.pack("<I", crc32c(data))


def decode_index(spec: ShardSpec, data: Buffer, data_nbytes: int) -> list[Place | None]:
    """Return where the chunks of a shard lie, whose index follows ``data_nbytes`` of them.

    Raises:
        CorruptionError: It is damaged, or its chunks do not lie one after another from the start
            of the file to the index, each no longer than it can be.
    """
    (expected,) = struct.unpack_from("<I", data, len(data) - CRC_NBYTES)
    found = crc32c(data[:-CRC_NBYTES])
    if found != expected:
        raise CorruptionError(f"crc32c is {found:08x}, the index says {expected:08x}")
    pairs = list(struct.iter_unpack("<QQ", data[:-CRC_NBYTES]))
    places: list[Place | None] = []
    end = 0
    for chunk, (offset, nbytes) in enumerate(pairs):
        if offset == nbytes == _ABSENT:
            places.append(None)
            continue
        _check_place(spec, chunk, offset, nbytes, end)
        places.append((offset, nbytes))
        end = offset + nbytes
    if end != data_nbytes:
        raise CorruptionError(f"its chunks end at {end}, the index begins at {data_nbytes}")
    return places[: spec.chunks]


def _check_place(spec: ShardSpec, chunk: int, offset: int, nbytes: int, end: int) -> None:
    if chunk >= spec.chunks:
        raise CorruptionError(f"chunk {chunk} is present in a shard of {spec.chunks} chunks")
    if offset != end:
        raise CorruptionError(f"chunk {chunk} begins at {offset}, the one before it ends at {end}")
    if not CRC_NBYTES < nbytes <= spec.max_encoded_nbytes:
        raise CorruptionError(
            f"chunk {chunk} at offset {offset} has {nbytes} B, it can have "
            f"{CRC_NBYTES + 1} to {spec.max_encoded_nbytes} B"
        )
