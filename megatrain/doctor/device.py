"""The block devices under a file system, from sysfs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrain.doctor.findings import Finding, Verdict
from megatrain.doctor.mounts import Mount
from megatrain.doctor.pci import Link, link

SYSFS = Path("/sys")

# name: what it is, and whether the drive behind it is out of sight
_KINDS = (
    ("nvme", "NVMe", False),
    ("vd", "virtio disk", True),
    ("xvd", "Xen disk", True),
    ("loop", "loop device", False),
    ("zram", "RAM (zram)", False),
    ("ram", "RAM disk", False),
    ("pmem", "persistent memory", False),
    ("mmcblk", "SD or eMMC card", False),
    ("nbd", "network disk (nbd)", True),
    ("rbd", "network disk (Ceph)", True),
    ("dm-", "device mapper", False),
    ("md", "RAID (md)", False),
    ("sd", "SCSI, SATA or USB disk", False),
)
_VIRTUAL_VENDORS = frozenset({"QEMU", "VMWARE", "MSFT", "VBOX", "GOOGLE", "XEN"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A whole block device, not a partition.

    Attributes:
        virtual: Whether it is known to be a program's or a host's, the real drive out of sight.
        rotational: What the kernel believes; a guess for virtual devices.
        write_cache: "write back" or "write through", as the kernel believes.
        backing: The file under a loop device.
        parts: The devices that it is made of.
    """

    name: str
    kind: str
    virtual: bool
    model: str = ""
    rotational: bool | None = None
    write_cache: str = ""
    link: Link | None = None
    backing: str = ""
    parts: tuple[Device, ...] = ()

    def leaves(self) -> Iterator[Device]:
        """Yield the devices at the bottom."""
        for part in self.parts:
            yield from part.leaves()
        if not self.parts:
            yield self


def devices_of(mount: Mount, sysfs: Path = SYSFS) -> tuple[Device, ...]:
    """Return the devices under a mount; none if it has none or they cannot be seen."""
    if mount.filesystem == "btrfs":
        found = _btrfs(mount, sysfs)
        if found:
            return found
    number = _number(mount)
    folder = sysfs / "dev" / "block" / number
    return (describe(folder.resolve()),) if number and folder.exists() else ()


def _number(mount: Mount) -> str:
    if not mount.number.startswith("0:"):
        return mount.number
    try:
        about = os.stat(mount.source)
    except OSError:
        return ""
    if not stat.S_ISBLK(about.st_mode):
        return ""
    return f"{os.major(about.st_rdev)}:{os.minor(about.st_rdev)}"


def _btrfs(mount: Mount, sysfs: Path) -> tuple[Device, ...]:
    """Return all devices of a btrfs; a mount names only one of them."""
    name = Path(mount.source).resolve().name
    for folder in sorted((sysfs / "fs" / "btrfs").glob(f"*/devices/{name}")):
        return tuple(describe(device.resolve()) for device in sorted(folder.parent.iterdir()))
    return ()


def describe(folder: Path) -> Device:
    """Return the device at ``folder`` of sysfs; of a partition, the device that it is cut from."""
    if (folder / "partition").exists():
        folder = folder.parent
    kind, virtual = _kind(folder)
    queue, slaves = folder / "queue", folder / "slaves"
    parts = sorted(slaves.iterdir()) if slaves.is_dir() else []
    return Device(
        name=_text(folder / "dm" / "name") or folder.name,
        kind=kind,
        virtual=virtual,
        model=" ".join((_text(folder / "device" / "model")).split()),
        rotational={"0": False, "1": True}.get(_text(queue / "rotational")),
        write_cache=_text(queue / "write_cache"),
        link=link(folder / "device" / "device"),
        backing=_text(folder / "loop" / "backing_file"),
        parts=tuple(describe(part.resolve()) for part in parts),
    )


def _kind(folder: Path) -> tuple[str, bool]:
    vendor = _text(folder / "device" / "vendor").upper()
    hidden = "/virtio" in str(folder) or vendor in _VIRTUAL_VENDORS
    for prefix, kind, virtual in _KINDS:
        if folder.name.startswith(prefix):
            if prefix == "dm-":
                layer = _text(folder / "dm" / "uuid").partition("-")[0]
                kind = f"{kind}, {layer}" if layer else kind
            return kind, virtual or hidden
    return "block device", hidden


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def device_findings(mount: Mount, devices: tuple[Device, ...]) -> Iterator[Finding]:
    """Say what lies under a file system."""
    if not devices:
        yield Finding(
            subject="device",
            verdict=Verdict.UNKNOWN,
            found=f"{mount.source}: no block device that can be seen from here",
        )
    for device in devices:
        yield _finding(device)
        for leaf in device.leaves():
            if leaf is not device:
                yield _finding(leaf)


def _finding(device: Device) -> Finding:
    verdict, advice = _verdict(device)
    return Finding(
        subject="device",
        verdict=verdict,
        found=", ".join(_facts(device)),
        advice=advice,
        values={"name": device.name, "kind": device.kind, "model": device.model},
    )


def _facts(device: Device) -> Iterator[str]:
    yield f"{device.name}: {device.kind}"
    if device.model:
        yield device.model
    if device.backing:
        yield f"over the file {device.backing}"
    if device.virtual:
        yield "the drive behind it cannot be seen from here"
    elif device.rotational and not device.backing and not device.parts:
        yield "the kernel says it rotates"
    if device.link:
        yield str(device.link)
    if device.write_cache and not device.parts:
        yield _CACHES.get(device.write_cache, f"write cache: {device.write_cache}")


_CACHES = {
    "write back": "the kernel says it has a volatile write cache, which a sync flushes",
    "write through": "the kernel knows of no volatile write cache",
}


def _verdict(device: Device) -> tuple[Verdict, str]:
    if device.kind.startswith("RAM"):
        return Verdict.WARNING, "it is memory, and gone at power-off: use a folder on a drive"
    if device.virtual:
        return Verdict.UNKNOWN, ""
    if device.backing:
        return Verdict.NOTE, "look at the drive of the file: --drive on its folder"
    if device.rotational and not device.parts:
        return Verdict.WARNING, "a step moves 30 bytes a parameter: use a solid-state drive"
    if device.link and device.link.narrow:
        return Verdict.NOTE, "it has more lanes than its slot gives it: try another slot"
    return Verdict.OK, ""
