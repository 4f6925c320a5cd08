"""Reading one committed generation, which stays as it is for as long as it is open."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiering import lock
from tiering.checksum import Table
from tiering.drive import Drive
from tiering.drives import open_drives
from tiering.errors import CorruptionError, MegatrainError
from tiering.generations import checksums_of, find_generation, going_back, read_root
from tiering.manifest import Generation, Root
from tiering.opened import (
    ChunkRef,
    OpenGeneration,
    OpenStore,
    examine_generation,
    open_generation,
)
from tiering.slots import Shard


class StoreReader(OpenStore):
    """A hold on one generation: no writer reuses its slot before ``close``."""

    def __init__(
        self,
        path: Path,
        root: Root,
        generation: Generation,
        hold: int,
        found: OpenGeneration,
        drives: Sequence[Drive],
    ) -> None:
        self.root = root
        self.generation = generation
        self._hold = hold
        self.manifest, self._table = found.manifest, found.table
        records = {name: found.records[name] for name in found.locations}
        super().__init__(
            path=path, schema=root.schema, records=records, drives=drives, writable=False
        )
        self._files.attach(generation.slot, records, found.locations)

    def read(self, record_name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the record's bytes at ``offset``; any alignment will do.

        The checksums are not looked at: ``checksums`` has them.
        """
        self._files.read(self.generation.slot, record_name, offset, out)

    def checksums(self, name: str) -> Table:
        """Return the crc32c of every chunk of a record, as committed."""
        return checksums_of(name, self.manifest, self._table)

    def chunks(self, name: str) -> Iterator[ChunkRef]:
        """Yield where every chunk of a record lies and what its crc32c has to be."""
        for index in range(self.records[name].geometry.chunk_count):
            yield self.chunk(name, index)

    def shards(self, name: str) -> Sequence[Shard]:
        """Return where the shards of a record lie."""
        return self._files.locations(self.generation.slot)[name]

    def chunk(self, name: str, index: int) -> ChunkRef:
        """Return where one chunk of a record lies and what its crc32c has to be."""
        return self.chunk_in(name, index, self.generation.slot, self.checksums(name))

    def span(self, name: str, index: int) -> tuple[int, int] | None:
        """Return offset and length of a chunk in its shard's file; None if it is absent there.

        Raises:
            CorruptionError: It is encoded, and the index that says so is damaged.
            StorageError: That index cannot be read.
        """
        chunk, geometry = self.chunk(name, index), self.records[name].geometry
        if chunk.offset is not None:
            return chunk.offset, chunk.nbytes
        encoded = self._encoded_backend(chunk.drive)
        return encoded.place(chunk.path, index % geometry.chunks_per_shard)

    def close(self) -> None:
        """Close every file, then give the generation back."""
        if self._hold >= 0:
            super().close()
            os.close(self._hold)
            self._hold = -1


def open_reader(path: str | os.PathLike[str], *, generation: int | None = None) -> StoreReader:
    """Open the current or the given generation of a store for reading.

    Raises:
        RefusedError: There is no store at ``path``, or no such generation in it.
        CorruptionError: A manifest, metadata, drive, link or shard is not what was committed.
    """
    store = Path(os.path.abspath(path))
    root, found, hold = _hold_generation(store, generation)
    try:
        drives = open_drives(store, root.uuid, root.drives)
        with going_back(root, found):
            opened = open_generation(store, root, found, drives)
        return StoreReader(store, root, found, hold, opened, drives)
    except BaseException:
        os.close(hold)
        raise


def open_damaged(
    path: str | os.PathLike[str], *, generation: int
) -> tuple[StoreReader | None, tuple[MegatrainError, ...]]:
    """Open what is there of a generation; return it with everything that is wrong with it.

    The reader has the records whose shards are all there; None if the manifest is not whole.

    Raises:
        RefusedError: There is no store at ``path``, or no such generation in it.
        CorruptionError: The root or a drive is not what was committed.
    """
    store = Path(os.path.abspath(path))
    try:
        root, found, hold = _hold_generation(store, generation)
    except CorruptionError as fault:
        return None, (fault,)
    try:
        drives = open_drives(store, root.uuid, root.drives)
        examined = examine_generation(store, root, found, drives)
        if examined.found is None:
            os.close(hold)
            return None, examined.faults
        reader = StoreReader(store, root, found, hold, examined.found, drives)
    except BaseException:
        os.close(hold)
        raise
    return reader, examined.faults


def _hold_generation(store: Path, number: int | None) -> tuple[Root, Generation, int]:
    """Return a listed generation and a hold on it.

    The root is read again under the hold: a commit in between may have dropped the generation,
    and its slot may be in use already. Each retry means that another commit went through.
    """
    root = read_root(store)
    while True:
        generation = root.latest if number is None else find_generation(store, root, number)
        path = store / generation.folder / "manifest.json"
        fd = lock.hold(path)
        root = read_root(store)
        listed = root.find(generation.number) == generation
        if fd is not None and listed:
            return root, generation, fd
        if fd is not None:
            os.close(fd)
        elif listed:
            with going_back(root, generation):
                raise CorruptionError(
                    f"{path}: missing, though {store / 'zarr.json'} lists it", file=path
                )
