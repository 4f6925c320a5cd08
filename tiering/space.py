"""Room on the drives: what the slots still need, and taking it before anything depends on it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering import fsops
from tiering.drive import Drive, is_copy_on_write
from tiering.errors import FULL, CapacityError, StorageError
from tiering.records import ALIGNMENT, Record, round_up
from tiering.slots import Locations, Shard

_log = logging.getLogger(__name__)


def slots_nbytes(records: Sequence[Record], slots: int) -> int:
    """Return what ``slots`` slots of the records take when every byte has been written."""
    return sum(r.padded_nbytes * (1 if r.shared else slots) for r in records)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """The first ``nbytes`` of a shard need blocks; ``missing`` of them have none yet.

    ``kept`` says that it keeps the blocks it is given: an encoded one is replaced by a new file.
    """

    drive: int
    path: Path
    nbytes: int
    missing: int
    kept: bool


def reserve(records: Sequence[Record], slots: Sequence[Locations], drives: Sequence[Drive]) -> None:
    """Give every shard of the records that change its blocks; what is read stays the same.

    Raises:
        CapacityError: A drive is too small; the message is a table of need and free bytes.
    """
    needs = [need for locations in slots for need in _needs(records, locations)]
    missing = {d.number: sum(n.missing for n in needs if n.drive == d.number) for d in drives}
    _require_space(drives, missing)
    for drive in filter(is_copy_on_write, drives):
        _log.warning(
            "%s is copy-on-write: reserved blocks do not keep a later write from running out of "
            "space",
            drive.folder,
        )
    for need in filter(lambda need: need.kept, needs):
        try:
            fsops.reserve(need.path, need.nbytes)
        except StorageError as error:
            if error.errno not in FULL:
                raise
            raise CapacityError(f"{error}\n{_table(drives, missing)}") from error


def _needs(records: Sequence[Record], locations: Locations) -> Iterator[_Need]:
    for record in records:
        if record.shared:
            continue
        for number, shard in enumerate(locations[record.name]):
            nbytes = valid_nbytes(record, number)
            allocated = _allocated_nbytes(record, shard)
            missing = max(0, nbytes - allocated)
            yield _Need(
                drive=shard.drive,
                path=shard.path,
                nbytes=nbytes,
                missing=missing,
                kept=record.codec is None,
            )


def _allocated_nbytes(record: Record, shard: Shard) -> int:
    """Return the bytes of a shard that have blocks, without those of its index."""
    index = round_up(record.geometry.index_nbytes, ALIGNMENT)
    return max(0, 512 * shard.path.stat().st_blocks - index)


def is_reserved(record: Record, number: int, shard: Shard) -> bool:
    """Whether every valid byte of a shard has its block."""
    return _allocated_nbytes(record, shard) >= valid_nbytes(record, number)


def valid_nbytes(record: Record, shard: int) -> int:
    """Return the bytes of a shard that hold elements, in whole pages."""
    geometry = record.geometry
    left = record.nbytes - shard * geometry.shard_nbytes
    return round_up(min(left, geometry.shard_nbytes), ALIGNMENT)


def _require_space(drives: Sequence[Drive], missing: Mapping[int, int]) -> None:
    """Refuse before anything is taken; drives on one file system share its room."""
    wanted: dict[int, int] = {}
    for drive in drives:
        device = drive.folder.stat().st_dev
        wanted[device] = wanted.get(device, 0) + missing[drive.number]
    for drive in drives:
        if wanted[drive.folder.stat().st_dev] > drive.free_nbytes():
            raise CapacityError(
                f"drive {drive.number} full: the slots do not fit\n{_table(drives, missing)}"
            )


def _table(drives: Sequence[Drive], missing: Mapping[int, int]) -> str:
    rows = [f"{'drive':>5} {'need B':>16} {'free B':>16}  folder"]
    rows += [
        f"{d.number:>5} {missing[d.number]:>16} {d.free_nbytes():>16}  {d.folder}" for d in drives
    ]
    return "\n".join(rows)
