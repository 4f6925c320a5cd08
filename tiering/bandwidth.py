"""How fast drives read and write what training does, and the shares that follow from it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiering.arena import Arena
from tiering.backends.probe import open_unnamed, probe
from tiering.drive import Drive, free_nbytes, nearest
from tiering.errors import StorageError
from tiering.records import ALIGNMENT
from tiering.shares import Room, capped

_log = logging.getLogger(__name__)

SAMPLE_NBYTES = 64 << 20
REQUEST_NBYTES = 8 << 20
_PART_OF_FREE = 4  # a drive that is nearly full is measured with a quarter of what is free


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one drive was measured to do with large requests."""

    read_bytes_per_s: float
    written_bytes_per_s: float

    @property
    def mixed_bytes_per_s(self) -> float:
        """The rate of the optimizer's mix, which reads and writes the same number of bytes."""
        if not self.read_bytes_per_s or not self.written_bytes_per_s:
            return 0.0
        return 2 / (1 / self.read_bytes_per_s + 1 / self.written_bytes_per_s)


Measure = Callable[[Path], Rates]


def measure(folder: Path, nbytes: int = SAMPLE_NBYTES) -> Rates:
    """Return how fast a file without a name in ``folder`` is overwritten and read.

    Large requests from huge pages, around the page cache where that works. A drive with next to
    no free bytes has rates of 0.
    """
    direct = probe(folder).direct
    nbytes = min(nbytes, free_nbytes(folder) // _PART_OF_FREE)
    nbytes -= nbytes % ALIGNMENT
    if not nbytes:
        return Rates(read_bytes_per_s=0.0, written_bytes_per_s=0.0)
    try:
        with Arena(min(nbytes, REQUEST_NBYTES), lock=False) as arena:
            return _measure(folder, arena.take("request", arena.nbytes), nbytes, direct=direct)
    except OSError as error:
        raise StorageError("measure", folder, errno=error.errno or 0, wanted=nbytes) from error


def _measure(folder: Path, request: memoryview, nbytes: int, *, direct: bool) -> Rates:
    request[:] = os.urandom(request.nbytes)  # zeros may never reach the drive
    fd = open_unnamed(folder, os.O_DIRECT if direct else 0)
    try:
        _written(fd, request, nbytes)  # takes the blocks: training overwrites, that is faster
        written_s = _timed(lambda: _written(fd, request, nbytes))
        os.posix_fadvise(fd, 0, nbytes, os.POSIX_FADV_DONTNEED)
        read_s = _timed(lambda: _moved(os.preadv, fd, request, nbytes))
    finally:
        os.close(fd)
        request.release()
    return Rates(read_bytes_per_s=nbytes / read_s, written_bytes_per_s=nbytes / written_s)


def _written(fd: int, request: memoryview, nbytes: int) -> None:
    _moved(os.pwritev, fd, request, nbytes)
    os.fdatasync(fd)


def _moved(
    move: Callable[[int, list[memoryview], int], int], fd: int, request: memoryview, nbytes: int
) -> None:
    offset = 0
    while offset < nbytes:
        moved = move(fd, [request[: nbytes - offset]], offset)
        if moved <= 0:
            raise OSError(0, "ended early")
        offset += moved - moved % ALIGNMENT or moved


def _timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return max(time.perf_counter() - started, 1e-9)


def with_shares(
    drives: Sequence[Drive],
    nbytes: int,
    *,
    measure: Measure,
    held: Mapping[int, int] | None = None,
) -> tuple[Drive, ...]:
    """Return the drives with shares of ``nbytes`` by rate, as far as their free bytes allow.

    Drives need not be created yet. ``held`` are bytes on a file system (by its st_dev) that count
    as free, because they are part of ``nbytes``. What was found is logged, a line a drive. A single
    drive is not measured.
    """
    if len(drives) == 1:
        return (replace(drives[0], share=1.0),)
    rates = {drive.number: measure(nearest(drive.folder)) for drive in drives}
    rooms = {drive.number: _room(drive, rates[drive.number], held or {}) for drive in drives}
    shares = capped(rooms, nbytes)
    for drive in drives:
        _log.info("%s", _line(drive, rates[drive.number], shares[drive.number]))
    free = sum({room.device: room.free_nbytes for room in rooms.values()}.values())
    if free < nbytes:
        _log.warning("the drives have %d B for the %d B that training will need", free, nbytes)
    return tuple(replace(drive, share=shares[drive.number]) for drive in drives)


def _room(drive: Drive, rates: Rates, held: Mapping[int, int]) -> Room:
    folder = nearest(drive.folder)
    device = folder.stat().st_dev
    free = free_nbytes(folder) + held.get(device, 0)
    return Room(bytes_per_s=rates.mixed_bytes_per_s, free_nbytes=free, device=device)


def _line(drive: Drive, rates: Rates, share: float) -> str:
    return (
        f"drive {drive.number} {drive.folder}: reads {rates.read_bytes_per_s / 1e9:.2f} GB/s, "
        f"writes {rates.written_bytes_per_s / 1e9:.2f} GB/s, takes {100 * share:.1f} % of the bytes"
    )
