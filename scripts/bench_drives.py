"""Move records as an update does over 1, 2 and 4 drives that are each held to the same rate.

The drives are loop devices with ext4, throttled by the blkio controller of cgroups v1, so that what
several give together can be told from what the one disk below them gives. Needs root.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tiering.arena import Arena
from tiering.bandwidth import Rates
from tiering.checksum import zeros_table
from tiering.pool import Pool
from tiering.recordio import Transfer
from tiering.records import Record, Tier
from tiering.store import create_store, open_writer

MIB = 1 << 20
ROLES = {"weights": "bfloat16", "master": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
READ = ("master", "exp_avg", "exp_avg_sq")
CONTROLLER = Path("/sys/fs/cgroup/blkio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the images are made")
    parser.add_argument("--rate", type=int, default=64, help="MiB/s of each drive and direction")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--length", type=int, default=4 * MIB, help="elements of a unit")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    alone = None
    for count in (1, 2, 4):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
            drives = [
                stack.enter_context(loop_drive(folder, number, 1 << 30)) for number in range(count)
            ]
            pool, names = stack.enter_context(filled(folder / "store", drives, options))
            with held_to([device for _, device in drives], options.rate * MIB):
                seconds = update(pool, names, options.length)
        rate = options.units * options.length * (12 + 14) / seconds / MIB
        alone = alone or rate
        print(f"{count} drives: {rate:.0f} MiB/s read and written, {rate / alone:.2f} of one drive")


@contextmanager
def loop_drive(folder: Path, number: int, nbytes: int) -> Iterator[tuple[Path, str]]:
    """Lend a mounted loop device with ext4 and its device number."""
    image, point = folder / f"image{number}", folder / f"drive{number}"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(nbytes)
    run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", image)
    device = run("losetup", "--direct-io=on", "-f", "--show", image)
    try:
        run("mount", device, point)
        try:
            status = os.stat(device).st_rdev
            yield point, f"{os.major(status)}:{os.minor(status)}"
        finally:
            run("umount", point)
    finally:
        run("losetup", "-d", device)


def run(*command: object) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def filled(
    path: Path, drives: Sequence[tuple[Path, str]], options: argparse.Namespace
) -> Iterator[tuple[Pool, list[str]]]:
    """Lend a pool with all records on the drives, in equal shares, every block written once."""
    units = [f"u{number}" for number in range(options.units)]
    records = [
        Record(name=f"{unit}.{role}", dtype=dtype, length=options.length, shard_nbytes=8 * MIB)
        for unit in units
        for role, dtype in ROLES.items()
    ]
    folders = [folder for folder, _ in drives]
    checksums = {record.name: zeros_table(record) for record in records}
    with create_store(
        path,
        records=records,
        schema_files={},
        drives=folders,
        slots=2,
        measure=lambda _: Rates(read_bytes_per_s=1e9, written_bytes_per_s=1e9),
    ) as writer:
        writer.commit(step=0, train_state={}, checksums=checksums)
    with open_writer(path) as writer, Arena(14 * MIB) as arena:
        writer.reserve()
        pool = Pool(writer, dict.fromkeys(writer.records, Tier.NVME), {Tier.PINNED: arena})
        for step in (1, 2):
            pool.begin_step()
            update(pool, units, options.length)
            pool.commit(step=step, train_state={}, checksums=checksums)
        pool.begin_step()
        yield pool, units


def update(pool: Pool, units: Sequence[str], length: int) -> float:
    """Read and write every unit slab by slab, in two threads as the lanes do; return seconds."""
    spans = [(unit, start) for unit in units for start in range(0, length, MIB)]
    began = time.perf_counter()
    writer = threading.Thread(target=each, args=(pool.write_all, tuple(ROLES), spans))
    writer.start()
    each(pool.read_all, READ, spans)
    writer.join()
    return time.perf_counter() - began


def each(
    move: Callable[[Sequence[Transfer]], None],
    roles: Sequence[str],
    spans: Sequence[tuple[str, int]],
) -> None:
    with Arena(4 * MIB * len(roles), lock=False) as arena:
        views = {role: arena.take(role, 4 * MIB) for role in roles}
        for unit, start in spans:
            move(transfers(unit, start, views))
        views.clear()


def transfers(unit: str, start: int, views: Mapping[str, memoryview]) -> list[Transfer]:
    """Return a slab of a unit's records."""
    sizes = {role: 2 if role == "weights" else 4 for role in views}
    return [
        Transfer(f"{unit}.{role}", start * sizes[role], view[: sizes[role] * MIB])
        for role, view in views.items()
    ]


@contextmanager
def held_to(devices: Sequence[str], bytes_per_s: int) -> Iterator[None]:
    """Hold this process to a rate on each of the devices, for reading and for writing."""
    group = CONTROLLER / f"bench-drives-{os.getpid()}"
    group.mkdir()
    try:
        for device in devices:
            for way in ("read", "write"):
                limit = group / f"blkio.throttle.{way}_bps_device"
                limit.write_text(f"{device} {bytes_per_s}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (CONTROLLER / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


if __name__ == "__main__":
    main()
