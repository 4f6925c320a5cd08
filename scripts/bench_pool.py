"""Stream records through the pool and through fio on the same file system, in turn, as ratios.

fio is swept first over engines, sizes of blocks and depths, with direct I/O and huge pages; the
best setting for reading, writing and both at once is then run in turn with the pool, in random
order: a shared disk is faster after a rest. Neither moves zeros, which a disk may not store.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

from tiering.arena import Arena
from tiering.checksum import zeros_table
from tiering.pool import Pool
from tiering.records import Record, Tier
from tiering.store import create_store, open_writer

GIB = 1 << 30
RECORD_NBYTES = 256 << 20

Fio = tuple[str, str, int]  # engine, block size, depth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder of the file system to measure")
    parser.add_argument("--nbytes", type=int, default=4 * GIB)
    parser.add_argument("--slab", type=int, default=16 << 20, help="bytes of one request")
    parser.add_argument("--lanes", type=int, default=4, help="threads that ask for slabs")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        _huge_pages(160 << 20),
        _pool(Path(folder) / "store", options) as pool,
    ):
        compare(pool, FioFile(Path(folder) / "fio", options.nbytes), options.repeats)


def compare(pool: Streams, fio: FioFile, repeats: int) -> None:
    for name, ours in (("read", pool.read), ("write", pool.write), ("rw", pool.both)):
        best = fio.best(name)
        print(f"{name}: best of fio is {best[0]}, {best[1]} blocks, depth {best[2]}", flush=True)
        ratios = []
        for _ in range(repeats):
            theirs_s, ours_s = _in_turn(partial(fio.run, name, best), partial(_seconds, ours))
            ratios.append(theirs_s / ours_s)
            print(
                f"  fio {pool.nbytes / theirs_s / GIB:.2f} GiB/s, "
                f"pool {pool.nbytes / ours_s / GIB:.2f} GiB/s, ratio {ratios[-1]:.3f}"
            )
        print(f"{name}: median ratio {statistics.median(ratios):.3f}", flush=True)


def _in_turn(one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float]:
    """Return what both say; which of them goes first is left to chance."""
    if random.random() < 0.5:
        return one(), other()
    second = other()
    return one(), second


class FioFile:
    """One preallocated file of ``nbytes`` that fio works on."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self.run("write", ("psync", "4M", 1))

    def best(self, kind: str) -> Fio:
        """Return the fastest setting by a quarter of the bytes, the better of two runs of each."""
        settings = [
            *product(("libaio", "io_uring"), ("1M", "2M", "4M", "8M"), (1, 4, 16)),
            *product(("psync",), ("1M", "4M", "8M"), (1,)),
        ]
        nbytes = self.nbytes // 4
        return min(settings, key=lambda fio: min(self.run(kind, fio, nbytes) for _ in range(2)))

    def run(self, kind: str, fio: Fio, nbytes: int | None = None) -> float:
        """Return the seconds that fio says it moved the bytes in, by default all."""
        engine, block, depth = fio
        command = [
            "fio",
            "--name=x",
            f"--filename={self.path}",
            f"--size={nbytes or self.nbytes}",
            f"--rw={kind}",
            f"--ioengine={engine}",
            f"--bs={block}",
            f"--iodepth={depth}",
            "--direct=1",
            "--mem=mmaphuge",
            "--allow_file_create=1",
            "--output-format=json",
        ]
        if kind == "rw":
            command += ["--rwmixread=50", "--norandommap"]
        document = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return max(float(document["jobs"][0][way]["runtime"]) for way in ("read", "write")) / 1000


class Streams:
    """The pool with all records on drives, and a slab for each lane."""

    def __init__(self, pool: Pool, records: Sequence[Record], slabs: Sequence[memoryview]) -> None:
        self._pool, self._records, self._slabs = pool, records, slabs
        self.nbytes = sum(record.nbytes for record in records)

    def read(self) -> None:
        """Read every record once."""
        self._each(self._records, self._pool.read)

    def write(self) -> None:
        """Write every record once."""
        self._each(self._records, self._pool.write)

    def both(self) -> None:
        """Read one half and write the other at once, as the lanes of the optimizer do."""
        half = len(self._records) // 2
        other = threading.Thread(target=self._each, args=(self._records[half:], self._pool.write))
        other.start()
        self._each(self._records[:half], self._pool.read, first=len(self._slabs) // 2)
        other.join()

    def _each(
        self,
        records: Sequence[Record],
        move: Callable[[str, int, memoryview], None],
        first: int = 0,
    ) -> None:
        count = len(self._slabs) // 2
        pieces = [
            (record.name, offset)
            for record in records
            for offset in range(0, record.nbytes, len(self._slabs[0]))
        ]

        def lane(number: int) -> None:
            slab = self._slabs[first + number]
            for name, offset in pieces[number::count]:
                move(name, offset, slab)

        with ThreadPoolExecutor(count) as lanes:
            list(lanes.map(lane, range(count)))


@contextmanager
def _pool(path: Path, options: argparse.Namespace) -> Iterator[Streams]:
    count = max(2, options.nbytes // RECORD_NBYTES)
    records = [
        Record(name=f"r{i}", dtype="float32", length=RECORD_NBYTES // 4) for i in range(count)
    ]
    with create_store(path, records=records, schema_files={}, slots=2) as writer:
        writer.commit(step=0, train_state={}, checksums={r.name: zeros_table(r) for r in records})
    arena = Arena(2 * options.lanes * options.slab)
    with open_writer(path) as writer:
        writer.reserve()
        pool = Pool(writer, dict.fromkeys(writer.records, Tier.NVME), {Tier.PINNED: arena})
        slabs = [arena.take(f"slab {i}", options.slab) for i in range(2 * options.lanes)]
        for slab in slabs:
            slab[:] = os.urandom(len(slab))
        streams = Streams(pool, records, slabs)
        for step in (1, 2):  # the first pass over each slot gives it its extents
            pool.begin_step()
            streams.write()
            checksums = {r.name: zeros_table(r) for r in records}
            pool.commit(step=step, train_state={}, checksums=checksums)
        pool.begin_step()
        yield streams


@contextmanager
def _huge_pages(nbytes: int) -> Iterator[None]:
    """Lend fio huge pages, which it cannot make itself; that takes root."""
    knob = Path("/proc/sys/vm/nr_hugepages")
    before = knob.read_text()
    knob.write_text(str(nbytes // (2 << 20) + int(before)))
    try:
        yield
    finally:
        knob.write_text(before)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
