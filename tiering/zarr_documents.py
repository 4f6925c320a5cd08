"""The bytes that make shard files a Zarr v3 array: metadata documents and shard indexes. Pure."""

from __future__ import annotations

import struct
from typing import Any

from tiering.checksum import crc32c
from tiering.codecs import LITTLE, Codec, empty_shard, inner_codecs, shard_spec
from tiering.manifest import encode_json
from tiering.records import Record

_ABSENT = (1 << 64) - 1


def group_document() -> bytes:
    """Return the ``zarr.json`` of a group without attributes."""
    return encode_json({"zarr_format": 3, "node_type": "group", "attributes": {}})


def array_document(record: Record) -> bytes:
    """Return the ``zarr.json`` of the array of ``record``: shards with their index at the end.

    Zarr v3 core, and the sharding codec of its registry.
    """
    geometry = record.geometry
    shard_length = geometry.chunk_length * geometry.chunks_per_shard
    return encode_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [record.length],
            "data_type": record.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard_length]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": _fill_value(record.dtype),
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [geometry.chunk_length],
                        "codecs": _chunk_codecs(record),
                        "index_codecs": [LITTLE, {"name": "crc32c"}],
                        "index_location": "end",
                    },
                }
            ],
            "attributes": dict(record.attributes),
        }
    )


def _chunk_codecs(record: Record) -> list[Any]:
    if record.codec is None:
        return [LITTLE]
    return inner_codecs(record.itemsize, Codec.named(record.codec))


def _fill_value(dtype: str) -> Any:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0 if dtype.startswith(("int", "uint")) else 0.0


def new_shard(record: Record, shard: int) -> tuple[int, bytes]:
    """Return the length of a shard that reads as zeros, and what ends it; the rest is a hole."""
    if record.codec is None:
        return record.geometry.file_nbytes(shard), shard_index(record, shard)
    tail = empty_shard(shard_spec(record, shard))
    return len(tail), tail


def shard_index(record: Record, shard: int) -> bytes:
    """Return the index of a shard without a codec: (offset, length) of each chunk, then its crc32c.

    Every chunk that the array has is marked present, also while it is a hole that reads as zeros;
    the places of a short last shard are marked absent and take no room in the file.
    """
    geometry = record.geometry
    present = geometry.chunks_in(shard)
    places = b"".join(
        struct.pack("<QQ", chunk * geometry.chunk_nbytes, geometry.chunk_nbytes)
        for chunk in range(present)
    )
    places += struct.pack("<QQ", _ABSENT, _ABSENT) * (geometry.chunks_per_shard - present)
    return places + struct.pack("<I", crc32c(places))
