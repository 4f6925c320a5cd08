"""What lies behind the valid bytes of a shard without a codec: zeros, then its index."""

from __future__ import annotations

import os
from pathlib import Path

from tiering.errors import StorageError
from tiering.records import Record
from tiering.zarr_documents import shard_index

_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)


def wrong_tail(record: Record, number: int, path: Path) -> tuple[int, str] | None:
    """Return where the tail of a shard first differs from what it must be, and how; or None.

    No checksum covers it: it is the same for every content.
    """
    geometry = record.geometry
    index = geometry.chunks_in(number) * geometry.chunk_nbytes
    end = min(index, record.nbytes - number * geometry.shard_nbytes)
    try:
        with path.open("rb") as file:
            for start in range(end, index, _PIECE):
                found = os.pread(file.fileno(), min(_PIECE, index - start), start)
                if found != _ZEROS[: len(found)]:
                    at = next(i for i, byte in enumerate(found) if byte)
                    return start + at, f"byte {found[at]:02x} behind the last element, expected 00"
            expected = shard_index(record, number)
            found = os.pread(file.fileno(), len(expected) + 1, index)
    except OSError as error:
        raise StorageError("read", path, errno=error.errno or 0, offset=end) from error
    if found == expected:
        return None
    pairs = zip(found.ljust(len(expected), b"\0"), expected, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected))
    return index + at, "the shard's index is not what its length demands"
