"""All that is looked at of one drive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatrain.doctor import burn as burning
from megatrain.doctor import speed
from megatrain.doctor.device import Device, device_findings, devices_of
from megatrain.doctor.filesystem import (
    RAM,
    copies_on_write,
    filesystem_findings,
    space_findings,
)
from megatrain.doctor.findings import Finding, Section, Verdict, looked_at
from megatrain.doctor.mounts import Mount, mount_of
from megatrain.doctor.stream import scratch
from megatrain.doctor.wear import wear_findings
from tiering.backends.probe import Access, probe


def check_burn(folder: Path, nbytes: int) -> None:
    """Refuse a burn of ``folder`` that would fill it or say nothing about it."""
    burning.check(folder, nbytes, probe(folder))


def drive_section(folder: Path, *, burn: int | None, on_progress: burning.Progress) -> Section:
    """Return what is found of the drive of ``folder``."""
    mount = mount_of(folder)
    devices = devices_of(mount) if mount else ()
    findings = [
        *looked_at("file system", lambda: _lying(folder, mount, devices)),
        *looked_at("space", lambda: space_findings(folder)),
        *looked_at(
            "transfers",
            lambda: _moving(folder, devices, burn, on_progress),
            failing=Verdict.PROBLEM,  # reading and writing is what a drive is for
        ),
        *looked_at("wear", lambda: wear_findings(devices)),
    ]
    return Section(title=f"drive {folder}", findings=tuple(findings))


def _lying(folder: Path, mount: Mount | None, devices: tuple[Device, ...]) -> Iterator[Finding]:
    if mount is None:
        found = "the kernel does not say which mount this folder is on"
        yield Finding(subject="file system", verdict=Verdict.UNKNOWN, found=found)
        return
    yield from filesystem_findings(mount, copies=copies_on_write(folder, mount))
    if mount.filesystem not in RAM:
        yield from device_findings(mount, devices)


def _moving(
    folder: Path, devices: tuple[Device, ...], burn: int | None, on_progress: burning.Progress
) -> Iterator[Finding]:
    try:
        with scratch(folder, direct=False):
            pass
    except OSError as error:
        yield Finding(
            subject="writing",
            verdict=Verdict.PROBLEM,
            found=f"no file can be made here: {error.strerror}",
            advice="name a folder that this user may write to",
        )
        return
    access = probe(folder)
    yield from speed.transfer_findings(folder, access)
    yield from _syncing(folder, devices, access)
    if burn is not None:
        yield from burning.burn_findings(folder, burn, on_progress)


def _syncing(folder: Path, devices: tuple[Device, ...], access: Access) -> Iterator[Finding]:
    if not access.in_ram:
        virtual = any(leaf.virtual for device in devices for leaf in device.leaves())
        yield from speed.sync_findings(folder, direct=access.direct, virtual=virtual)


def shared_section(folders: list[Path]) -> Section | None:
    """Return what is found of all drives together, or None if that is nothing."""
    findings = tuple(looked_at("together", lambda: _shared(folders)))
    return Section(title="drives together", findings=findings) if findings else None


def _shared(folders: list[Path]) -> Iterator[Finding]:
    seen: dict[str, list[Path]] = {}
    for folder in folders:
        mount = mount_of(folder)
        names = {leaf.name for top in (devices_of(mount) if mount else ()) for leaf in top.leaves()}
        for name in names or {f"file system {os.stat(folder).st_dev}"}:
            seen.setdefault(name, []).append(folder)
    for name, sharing in seen.items():
        if len(sharing) > 1:
            yield Finding(
                subject="same device",
                verdict=Verdict.WARNING,
                found=f"{', '.join(map(str, sharing))} are all on {name}",
                advice="striping over them gains nothing: name one folder on each device",
            )
