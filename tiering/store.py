"""The doors of a store: create it, open it for writing, open it for reading."""

from __future__ import annotations

from tiering.creation import create_store
from tiering.opened import ChunkRef
from tiering.reader import StoreReader, open_damaged, open_reader
from tiering.resumption import open_newest_whole, open_writer
from tiering.writer import StoreWriter

__all__ = [
    "ChunkRef",
    "StoreReader",
    "StoreWriter",
    "create_store",
    "open_damaged",
    "open_newest_whole",
    "open_reader",
    "open_writer",
]
