"""The mount that a folder lies on, as the kernel lists it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A line of /proc/self/mountinfo (proc(5)).

    Attributes:
        number: Major and minor number as in "259:1"; major 0 is no block device.
        source: The device, server or name that was mounted.
        options: Of the mount and of the file system.
    """

    point: Path
    filesystem: str
    number: str
    source: str
    options: frozenset[str]


def mount_of(folder: Path) -> Mount | None:
    """Return the mount of ``folder``, or None if the kernel does not say."""
    # By the number of the mount: st_dev of btrfs and of overlays is in no line, and a path can
    # have several mounts on top of each other.
    fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        about = Path(f"/proc/self/fdinfo/{fd}").read_text()
    finally:
        os.close(fd)
    number = re.search(r"^mnt_id:\s*(\d+)$", about, re.MULTILINE)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if number and line.split()[0] == number[1]:
            return parse(line)
    return None


def parse(line: str) -> Mount:
    """Return what a line of mountinfo says."""
    place, _, what = line.partition(" - ")
    _, _, number, _, point, own = place.split()[:6]
    filesystem, source, whole = (*what.split(" "), "", "")[:3]
    return Mount(
        point=Path(_plain(point)),
        filesystem=filesystem,
        number=number,
        source=_plain(source),
        options=frozenset((*own.split(","), *whole.split(","))),
    )


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)
