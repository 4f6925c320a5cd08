"""Records: the smallest things that have a place, and how their bytes lie in shards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

ALIGNMENT = 4096  # bytes; offsets, lengths and buffers of every direct transfer are multiples of it
CHUNK_LENGTH = 1 << 20  # elements; a multiple of the optimizer's piece
SHARD_NBYTES = 256 << 20
SHARD_NBYTES_MOST = 1 << 40
NBYTES_MOST = 1 << 60  # of a record
DEFAULT_CODEC = "blosc-zstd-shuffle"  # the smallest: 0.68 of bf16 weights, 0.84 of fp32

ITEMSIZE: Mapping[str, int] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "complex64": 8,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
}


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")  # names become names of files


class Tier(StrEnum):
    """A kind of place for records, fastest first."""

    PINNED = "pinned"
    CXL = "cxl"
    NVME = "nvme"
    ZARR = "zarr"


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of a record's bytes that lies in one shard: ``start`` counts from the request."""

    shard: int
    offset: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a record is cut into chunks and shards; all shards but the last are full."""

    chunk_length: int
    chunk_nbytes: int
    chunk_count: int
    chunks_per_shard: int

    @property
    def shard_count(self) -> int:
        """Number of shard files."""
        return -(-self.chunk_count // self.chunks_per_shard)

    @property
    def shard_nbytes(self) -> int:
        """Data bytes of a full shard, without its index."""
        return self.chunks_per_shard * self.chunk_nbytes

    @property
    def index_nbytes(self) -> int:
        """Bytes of the shard index: an offset and a length per chunk, then a crc32c."""
        return 16 * self.chunks_per_shard + 4

    def chunks_in(self, shard: int) -> int:
        """Return the number of chunks that ``shard`` holds."""
        return min(self.chunks_per_shard, self.chunk_count - shard * self.chunks_per_shard)

    def file_nbytes(self, shard: int) -> int:
        """Return the length of the file of ``shard`` if nothing encodes it: chunks, then index."""
        return self.chunks_in(shard) * self.chunk_nbytes + self.index_nbytes

    def segments(self, offset: int, nbytes: int) -> Iterator[Segment]:
        """Cut the ``nbytes`` at ``offset`` of a record where its shards end."""
        start = 0
        while start < nbytes:
            shard, inside = divmod(offset + start, self.shard_nbytes)
            count = min(nbytes - start, self.shard_nbytes - inside)
            yield Segment(shard=shard, offset=inside, start=start, nbytes=count)
            start += count


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The contiguous bytes of one array: a name, a Zarr data type and a length in elements.

    ``attributes`` travel in the array's metadata and are opaque here. A ``shared`` record never
    changes: it is stored once and linked from every slot. With a ``codec`` its shards are encoded
    and replaced as wholes, without one they are overwritten in place. ``shard_nbytes`` is the most
    that a shard holds, before encoding.
    """

    name: str
    dtype: str
    length: int
    shared: bool = False
    codec: str | None = None
    shard_nbytes: int = SHARD_NBYTES
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        if self.length < 1 or self.dtype not in ITEMSIZE:
            raise ValueError(f"record {self.name}: {self.length} elements of {self.dtype!r}")
        if not NAME.fullmatch(self.name):
            raise ValueError(f"record name {self.name!r} does not match {NAME.pattern}")
        if self.nbytes > NBYTES_MOST:
            raise ValueError(f"record {self.name}: {self.length} elements are too many")
        if not 1 <= self.shard_nbytes <= SHARD_NBYTES_MOST:
            raise ValueError(f"record {self.name}: shards of {self.shard_nbytes} B")

    @property
    def tier(self) -> Tier:
        """The tier of its shards, where it lives unless it has a place in memory."""
        return Tier.NVME if self.codec is None else Tier.ZARR

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Valid bytes."""
        return self.length * self.itemsize

    @property
    def padded_nbytes(self) -> int:
        """Valid bytes rounded up to what a direct transfer moves."""
        return round_up(self.nbytes, ALIGNMENT)

    @property
    def geometry(self) -> Geometry:
        """Chunks, a function of dtype and length alone, and shards of so many of them."""
        length = min(CHUNK_LENGTH, round_up(self.nbytes, ALIGNMENT) // self.itemsize)
        chunk_nbytes = length * self.itemsize
        count = -(-self.length // length)
        per_shard = max(1, min(count, self.shard_nbytes // chunk_nbytes))
        return Geometry(
            chunk_length=length,
            chunk_nbytes=chunk_nbytes,
            chunk_count=count,
            chunks_per_shard=per_shard,
        )
