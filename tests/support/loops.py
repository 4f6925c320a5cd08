"""Real file systems for a test: on a loop device with the sector size of choice, or in memory.

Everything is undone at the end, also after a failure; a test that cannot have it is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 1 << 20
_LEAST = {  # images are sparse: most of it is never written
    "ext4": 16 * MIB,
    "xfs": 320 * MIB,
    "btrfs": 128 * MIB,
}
_MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}
_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A file system that is mounted at ``point``, and what it lies on.

    The image may be cut short to make reads fail, the device throttled to make it slow.
    """

    point: Path
    device: Path
    image: Path


@contextmanager
def loop_mount(
    folder: Path,
    *,
    filesystem: str = "ext4",
    nbytes: int = 64 * MIB,
    sector_nbytes: int = 512,
    options: str = "",
    name: str = "drive",
) -> Iterator[Mount]:
    """Lend a new file system at ``folder/name``; its image is ``folder/name.img``."""
    _require_root()
    if shutil.which(_MAKE[filesystem][0]) is None:
        pytest.skip(f"no {_MAKE[filesystem][0]} here")
    image, point = folder / f"{name}.img", folder / name
    with _loop_device(image, max(nbytes, _LEAST[filesystem]), sector_nbytes) as device:
        large = ["-b", f"size={sector_nbytes}"] if sector_nbytes > _PAGE else []
        if subprocess.run([*_MAKE[filesystem], *large, str(device)]).returncode:
            pytest.skip(f"no {filesystem} with {sector_nbytes} B sectors here")
        with _mounted(filesystem, str(device), point, options):
            yield Mount(point=point, device=device, image=image)
    image.unlink()


@contextmanager
def memory_mount(
    folder: Path, filesystem: str, *, nbytes: int = 64 * MIB, name: str = "memory"
) -> Iterator[Path]:
    """Lend a new ``tmpfs`` of ``nbytes`` or a ``ramfs`` at ``folder/name``."""
    _require_root()
    point = folder / name
    options = f"size={nbytes}" if filesystem == "tmpfs" else ""
    with _mounted(filesystem, "none", point, options):
        yield point


def _require_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts and loop devices")


@contextmanager
def _loop_device(image: Path, nbytes: int, sector_nbytes: int) -> Iterator[Path]:
    with image.open("xb") as file:
        file.truncate(nbytes)
    arguments = ["--sector-size", str(sector_nbytes), "--find", "--show", str(image)]
    done = subprocess.run(["losetup", *arguments], capture_output=True, text=True)
    if done.returncode:
        image.unlink()
        pytest.skip(f"no loop device here: {done.stderr.strip()}")
    device = Path(done.stdout.strip())
    try:
        yield device
    finally:
        _run("losetup", "--detach", str(device))


@contextmanager
def _mounted(filesystem: str, source: str, point: Path, options: str) -> Iterator[None]:
    point.mkdir()
    arguments = ["-t", filesystem, source, str(point), *(["-o", options] if options else [])]
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        point.rmdir()
        pytest.skip(f"cannot mount a {filesystem} here: {done.stderr.strip()}")
    try:
        yield
    finally:
        # Lazily: a descriptor that a failed test left open must not keep the mount for ever.
        _run("umount", "--lazy", str(point))
        point.rmdir()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
