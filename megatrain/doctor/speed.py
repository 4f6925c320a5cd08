"""How fast a drive is, and what a sync costs, measured on files without a name."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from checkpoint.sizes import format_size
from megatrain.doctor.filesystem import space
from megatrain.doctor.findings import Finding, Verdict
from megatrain.doctor.stream import random_block, scratch
from tiering import fsops
from tiering.backends.probe import Access
from tiering.bandwidth import Rates, measure
from tiering.records import ALIGNMENT

_FIRST_NBYTES = 32 << 20
_NBYTES = 256 << 20
_FAST_BYTES_PER_S = 400e6  # from here on the longer measurement takes two seconds at most
_SLOW_BYTES_PER_S = 200e6
_SYNCS = 16
_SYNCS_TAKE_S = 1.0
_SLOW_SYNC_S = 1.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Rates, and what the page cache saw of them.

    Attributes:
        written: Bytes written directly.
        dirtied: Bytes that went through the page cache meanwhile, whoever wrote them.
    """

    rates: Rates
    nbytes: int
    written: int
    dirtied: int

    @property
    def around_the_cache(self) -> bool:
        """Whether most of what was written cannot have passed through the page cache."""
        return self.dirtied < self.written / 2


def transfer_findings(folder: Path, access: Access) -> Iterator[Finding]:
    """Say whether direct I/O works in ``folder``, and how fast large requests move."""
    if access.in_ram:
        yield Finding(subject="direct I/O", verdict=Verdict.NONE, found=access.reason)
        return
    why_not = _refusal(folder, access)
    measured = None if why_not else _measured(folder)
    yield _direct_finding(access, measured)
    if measured is None:
        yield Finding(subject="speed", verdict=Verdict.UNKNOWN, found=f"not measured: {why_not}")
    else:
        yield speed_finding(measured)


def _refusal(folder: Path, access: Access) -> str:
    if not access.direct:
        return "without direct I/O it would be the page cache's speed"
    if space(folder)[0] < 4 * _NBYTES:
        return f"less than {format_size(4 * _NBYTES)} free"
    return ""


def _measured(folder: Path) -> Measured:
    first = _measure(folder, _FIRST_NBYTES)
    return _measure(folder, _NBYTES) if _slower(first.rates) > _FAST_BYTES_PER_S else first


def _measure(folder: Path, nbytes: int) -> Measured:
    before = _dirtied()
    rates = measure(folder, nbytes)
    # it writes twice, so that the second time finds the space allocated
    return Measured(rates=rates, nbytes=nbytes, written=2 * nbytes, dirtied=_dirtied() - before)


def _direct_finding(access: Access, measured: Measured | None) -> Finding:
    if not access.direct:
        return Finding(
            subject="direct I/O",
            verdict=Verdict.WARNING,
            found=access.reason,
            advice="use ext4 or XFS: going through the page cache costs speed and RAM",
            values={"direct": False},
        )
    found = f"a block aligned to {access.alignment} B reads back as it was written"
    values = {"direct": True, "alignment_nbytes": access.alignment}
    if measured is None or measured.around_the_cache:
        return Finding(subject="direct I/O", verdict=Verdict.OK, found=found, values=values)
    return Finding(
        subject="direct I/O",
        verdict=Verdict.NOTE,
        found=f"{found}; but {format_size(measured.dirtied)} went through the page cache while "
        f"{format_size(measured.written)} were written directly: by the file system, by the file "
        "under a loop device, or by another program",
        advice="if no other program writes, it is not direct: use ext4 or XFS on the drive itself",
        values={**values, "dirtied_nbytes": measured.dirtied},
    )


def _slower(rates: Rates) -> float:
    return min(rates.written_bytes_per_s, rates.read_bytes_per_s)


def speed_finding(measured: Measured) -> Finding:
    """Say how fast large requests move."""
    rates, nbytes = measured.rates, measured.nbytes
    slow = _slower(rates) < _SLOW_BYTES_PER_S
    return Finding(
        subject="speed",
        verdict=Verdict.WARNING if slow else Verdict.OK,
        found=f"reads {gigabytes(rates.read_bytes_per_s)}, overwrites "
        f"{gigabytes(rates.written_bytes_per_s)}, sync included ({format_size(nbytes)} in order, "
        "direct, from huge pages; too short to leave a drive's cache, see --burn)",
        advice="a step reads 16 and writes 14 bytes a parameter: use a faster drive"
        if slow
        else "",
        values={
            "read_bytes_per_s": rates.read_bytes_per_s,
            "written_bytes_per_s": rates.written_bytes_per_s,
            "nbytes": nbytes,
        },
    )


def gigabytes(bytes_per_s: float) -> str:
    """Return a rate for people."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _dirtied() -> int:
    """Return the bytes that programs have written to the page cache since the machine started."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("nr_dirtied "):
            return int(line.split()[1]) * _PAGE
    return 0


def sync_findings(folder: Path, *, direct: bool, virtual: bool) -> Iterator[Finding]:
    """Say what making a small write durable costs."""
    with scratch(folder, direct=direct) as fd, random_block() as block:
        os.pwritev(fd, [block], 0)
        os.fdatasync(fd)
        each_s = _repeated(lambda: _write_and_sync(fd, block[:ALIGNMENT]))
        whole_s = _elapsed_s(lambda: fsops.sync_drive(fd, folder))
    typical_s = statistics.median(each_s)
    slow = typical_s > _SLOW_SYNC_S
    told = "; whether it reached a real drive is the host's affair" if virtual else ""
    yield Finding(
        subject="sync",
        verdict=Verdict.WARNING if slow else Verdict.NOTE if virtual else Verdict.OK,
        found=f"fdatasync after a write of 4 KiB: {milliseconds(typical_s)} (median of "
        f"{len(each_s)}, longest {milliseconds(max(each_s))}); the whole file system, with what "
        f"other programs wrote: {milliseconds(whole_s)}{told}",
        advice="every commit pays this: commit less often, or use another drive" if slow else "",
        values={
            "fdatasync_median_s": typical_s,
            "fdatasync_longest_s": max(each_s),
            "syncfs_s": whole_s,
        },
    )


def _write_and_sync(fd: int, block: memoryview) -> None:
    os.pwritev(fd, [block], 0)
    os.fdatasync(fd)


def _repeated(act: Callable[[], None]) -> list[float]:
    found: list[float] = []
    while len(found) < _SYNCS and sum(found) < _SYNCS_TAKE_S:
        found.append(_elapsed_s(act))
    return found


def _elapsed_s(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def milliseconds(elapsed_s: float) -> str:
    """Return a time for people."""
    return f"{elapsed_s * 1e3:.3g} ms"
