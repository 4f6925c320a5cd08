"""The file system of a drive: what it promises, and how much room it has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from checkpoint.sizes import format_size
from megatrain.doctor.findings import Finding, Verdict
from megatrain.doctor.mounts import Mount
from tiering.backends.probe import IN_RAM

RAM = IN_RAM | {"devtmpfs", "hugetlbfs"}
_IN_PLACE = frozenset({"ext2", "ext3", "ext4", "xfs", "jfs", "vfat", "exfat"})
_COPIES = frozenset({"btrfs", "zfs", "bcachefs", "nilfs2", "f2fs"})
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "lustre", "beegfs"})
_NO_BARRIERS = frozenset({"nobarrier", "barrier=0"})
# layout fp32, bf16 weights, two slots
_STATE_BYTES_PER_PARAMETER = 28
_LITTLE = 1 << 30


def filesystem_findings(mount: Mount, *, copies: bool | None) -> Iterator[Finding]:
    """Say what a mounted file system is; ``copies``: as ``copies_on_write`` found."""
    verdict, promise, advice = _promise(mount, copies)
    yield Finding(
        subject="file system",
        verdict=verdict,
        found=f"{mount.filesystem} at {mount.point} ({mount.source}): {promise}",
        advice=advice,
        values={
            "filesystem": mount.filesystem,
            "mount_point": str(mount.point),
            "source": mount.source,
            "copy_on_write": copies,
            "in_memory": mount.filesystem in RAM,
        },
    )
    lost = sorted(mount.options & _NO_BARRIERS)
    if lost:
        yield Finding(
            subject="mount options",
            verdict=Verdict.PROBLEM,
            found=f"{', '.join(lost)}: a sync does not flush the drive's cache",
            advice="a power cut can destroy what was committed: mount without it",
        )


def copies_on_write(folder: Path, mount: Mount) -> bool | None:
    """Return whether overwriting writes somewhere else, or None if that cannot be said."""
    if mount.filesystem in _IN_PLACE or mount.filesystem in RAM:
        return False
    if mount.filesystem not in _COPIES:
        return None
    if mount.filesystem == "btrfs":
        return not ("nodatacow" in mount.options or _no_copy_flag(folder))
    return True


def _no_copy_flag(folder: Path) -> bool:
    """Return whether new files in ``folder`` are made with "chattr +C" (ioctl_iflags(2))."""
    import array
    import fcntl

    get_flags, no_copy = 0x80086601, 0x00800000
    flags = array.array("l", [0])
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, get_flags, flags)
    except OSError:
        return False
    finally:
        os.close(fd)
    return bool(flags[0] & no_copy)


def _promise(mount: Mount, copies: bool | None) -> tuple[Verdict, str, str]:
    if mount.filesystem in RAM:
        return (
            Verdict.WARNING,
            "this is RAM: it takes memory and is gone at power-off",
            "use a folder on a drive",
        )
    if copies:
        return (
            Verdict.WARNING,
            "copy-on-write: overwriting needs new space, so reserving it promises nothing",
            _NO_COPY_ADVICE if mount.filesystem == "btrfs" else "use ext4 or XFS",
        )
    if copies is not None:
        return Verdict.OK, "overwrites in place", ""
    if mount.filesystem in _REMOTE or mount.filesystem.startswith("fuse"):
        return Verdict.UNKNOWN, "what it promises is up to a server or program", ""
    if mount.filesystem == "overlay":
        return Verdict.UNKNOWN, "part of a container, what lies under it is out of sight", _VOLUME
    return Verdict.UNKNOWN, "not one that this program knows", ""


_VOLUME = "name a folder of a volume, which outlives the container"
_NO_COPY_ADVICE = "use ext4 or XFS, or a new folder after chattr +C on it"


def space_findings(folder: Path) -> Iterator[Finding]:
    """Say how much room there is."""
    free, total = space(folder)
    state = free / _STATE_BYTES_PER_PARAMETER / 1e9
    little = free < _LITTLE
    yield Finding(
        subject="space",
        verdict=Verdict.WARNING if little else Verdict.OK,
        found=f"{format_size(free)} free of {format_size(total)}: enough for "
        f"{state:.3g} billion parameters at {_STATE_BYTES_PER_PARAMETER} bytes each",
        advice="make room" if little else "",
        values={"free_nbytes": free, "total_nbytes": total},
    )


def space(folder: Path) -> tuple[int, int]:
    """Return bytes that this user may still write, and bytes in all."""
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
