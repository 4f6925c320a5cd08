"""Shards made and read without the code that is tested: packed by hand, read by other readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiering.checksum import crc32c
from tiering.codecs import ShardSpec, inner_codecs

ABSENT = (1 << 64) - 1


def packed_chunk(spec: ShardSpec, chunk: bytes | memoryview) -> bytes:
    """Return one chunk as it lies in a shard."""
    encoded = bytes(spec.codec.compress(memoryview(chunk), spec.itemsize))
    return encoded + struct.pack("<I", crc32c(encoded))


def packed_index(pairs: Sequence[tuple[int, int]]) -> bytes:
    """Return the index that says ``pairs``, whether or not they are true."""
    data = b"".join(struct.pack("<QQ", *pair) for pair in pairs)
    return data + struct.pack("<I", crc32c(data))


def packed_shard(spec: ShardSpec, content: bytes | memoryview) -> bytes:
    """Return the file of a shard in which no chunk is absent."""
    parts, pairs, end = [], [], 0
    for at in range(0, len(content), spec.chunk_nbytes):
        part = packed_chunk(spec, content[at : at + spec.chunk_nbytes])
        pairs.append((end, len(part)))
        parts.append(part)
        end += len(part)
    pairs += [(ABSENT, ABSENT)] * (spec.slots - len(pairs))
    return b"".join(parts) + packed_index(pairs)


def array_folder(
    folder: Path, *, dtype: str, length: int, spec: ShardSpec, shards: Sequence[Path]
) -> Path:
    """Make an array of ``length`` elements around ``shards``; ``spec`` is any of theirs."""
    chunk_length = spec.chunk_nbytes // spec.itemsize
    sharding = {
        "chunk_shape": [chunk_length],
        "codecs": inner_codecs(spec.itemsize, spec.codec),
        "index_codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "index_location": "end",
    }
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [length],
        "data_type": dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [chunk_length * spec.slots]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": False if dtype == "bool" else 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    (folder / "c").mkdir(parents=True)
    (folder / "zarr.json").write_text(json.dumps(document))
    for number, shard in enumerate(shards):
        (folder / "c" / str(number)).symlink_to(shard)
    return folder


def read_with_zarr(folder: Path) -> bytes:
    """Return the bytes of an array as zarr-python reads it."""
    import zarr

    from tiering.backends.zarr_bfloat16 import register_bfloat16

    register_bfloat16()
    return np.ascontiguousarray(zarr.open_array(folder, mode="r")[:]).tobytes()


def read_with_tensorstore(folder: Path) -> bytes:
    """Return the bytes of an array as tensorstore reads it."""
    import tensorstore

    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}
    array = tensorstore.open(spec, open=True, read=True).result()
    return np.ascontiguousarray(array.read().result()).tobytes()
