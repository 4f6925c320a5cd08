"""What the doctor says of drives: on real file systems, with sysfs trees made of real files."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.doctor import burn as burning
from megatrain.doctor.burn import Burn, burn_finding
from megatrain.doctor.device import describe, device_findings, devices_of
from megatrain.doctor.drive import drive_section, shared_section
from megatrain.doctor.filesystem import copies_on_write, filesystem_findings, space
from megatrain.doctor.findings import Finding, Section, Verdict
from megatrain.doctor.mounts import Mount, mount_of, parse
from megatrain.doctor.wear import (
    Device,
    Wear,
    _NvmeCommand,
    parse_nvme,
    parse_smartctl,
    read_nvme,
    wear_finding,
    wear_findings,
)
from tests.support.loops import MIB, loop_mount, memory_mount
from tiering.backends.probe import probe
from tiering.errors import CapacityError, RefusedError

COMMAND = [sys.executable, "-c", "from megatrain.cli import main; main()", "doctor"]


def look(folder: Path, burn: int | None = None) -> Section:
    return drive_section(folder, burn=burn, on_progress=lambda done, total: None)


def of(section: Section, subject: str) -> Finding:
    (found,) = [finding for finding in section.findings if finding.subject == subject]
    return found


def mount(filesystem: str, *options: str, **other: object) -> Mount:
    given = {"point": Path("/m"), "number": "0:40", "source": "/dev/x", **other}
    return Mount(filesystem=filesystem, options=frozenset(options), **given)


# -- where a folder lies -------------------------------------------------------------------------


def test_memory_is_called_memory_and_its_speed_is_not_a_drives(tmp_path):
    with memory_mount(tmp_path, "tmpfs", name="a b") as point:
        section = look(point)
        found = of(section, "file system")
        assert found.verdict is Verdict.WARNING
        assert "tmpfs" in found.found
        assert "RAM" in found.found
        assert str(point) in found.found
        assert of(section, "direct I/O").verdict is Verdict.NONE
        assert not {"speed", "sync"} & {finding.subject for finding in section.findings}
        assert os.listdir(point) == []


@pytest.mark.parametrize("filesystem", ["ext4", "xfs"])
def test_a_drive_is_described_as_it_is_and_left_as_it_was(tmp_path, filesystem):
    with loop_mount(tmp_path, filesystem=filesystem, nbytes=1400 * MIB) as drive:
        before = os.listdir(drive.point), space(drive.point)[0]
        section = look(drive.point)
        assert of(section, "file system").verdict is Verdict.OK
        assert f"{filesystem} at {drive.point}" in of(section, "file system").found
        assert f"over the file {drive.image}" in of(section, "device").found
        assert of(section, "direct I/O").values["direct"]
        assert of(section, "speed").values["read_bytes_per_s"] > 0
        assert of(section, "sync").values["fdatasync_median_s"] > 0
        assert of(section, "wear").verdict is Verdict.UNKNOWN
        assert os.listdir(drive.point) == before[0]
        assert abs(space(drive.point)[0] - before[1]) < 16 * MIB  # what XFS keeps for its inodes


def test_the_mount_on_top_is_the_one_that_counts(tmp_path):
    with memory_mount(tmp_path, "ramfs", name="one"):
        inner = tmp_path / "one" / "deeper"
        inner.mkdir()
        assert mount_of(inner).filesystem == "ramfs"
        assert mount_of(inner).point == tmp_path / "one"


def test_names_of_mounts_are_read_as_the_kernel_writes_them():
    line = (
        r"36 35 98:0 /a /mnt/two\040words rw,noatime shared:1 - ext4 /dev/my\134disk rw,barrier=0"
    )
    found = parse(line)
    assert (found.point, found.source) == (Path("/mnt/two words"), "/dev/my\\disk")
    assert found.options >= {"noatime", "barrier=0"}


def test_a_drive_that_cannot_be_written_is_a_problem(tmp_path):
    with loop_mount(tmp_path, options="ro") as drive:
        found = of(look(drive.point), "writing")
        assert found.verdict is Verdict.PROBLEM
        assert os.strerror(30) in found.found  # read-only file system


def test_copy_on_write_is_named_unless_it_is_off(tmp_path):
    copying = mount("btrfs")
    assert copies_on_write(tmp_path, copying)
    assert not copies_on_write(tmp_path, mount("btrfs", "nodatacow"))
    assert copies_on_write(tmp_path, mount("zfs"))
    assert copies_on_write(tmp_path, mount("nfs4")) is None
    (found,) = filesystem_findings(copying, copies=True)
    assert found.verdict is Verdict.WARNING
    assert "chattr +C" in found.advice


def test_what_an_unknown_file_system_promises_is_unknown():
    for filesystem in ("nfs4", "fuse.sshfs", "overlay", "neverheardof"):
        (found,) = filesystem_findings(mount(filesystem), copies=None)
        assert found.verdict is Verdict.UNKNOWN


def test_a_mount_without_barriers_loses_commits():
    found = list(filesystem_findings(mount("ext4", "nobarrier"), copies=False))
    assert [f.verdict for f in found] == [Verdict.OK, Verdict.PROBLEM]


def test_two_folders_on_one_device_stripe_nothing(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (found,) = shared_section([first, second]).findings
    assert found.verdict is Verdict.WARNING
    assert str(second) in found.found
    with loop_mount(tmp_path) as drive:
        assert shared_section([first, drive.point]) is None


# -- devices -------------------------------------------------------------------------------------


def block(sysfs: Path, place: str, name: str, **files: str) -> Path:
    """Make a block device in a sysfs tree of real files; a name of "a__b" is the file a/b."""
    folder = sysfs / "devices" / place / name
    for path, text in files.items():
        file = folder / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def numbered(sysfs: Path, number: str, folder: Path) -> None:
    link = sysfs / "dev" / "block" / number
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


def nvme(sysfs: Path, *, width: str = "4", rotational: str = "0") -> Path:
    lanes = {"current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "16.0 GT/s PCIe"}
    lanes |= {"current_link_width": width, "max_link_width": "4"}
    return block(
        sysfs,
        "pci0000:00/0000:01:00.0/nvme/nvme0",
        "nvme0n1",
        device__model="Some  Fast SSD 2TB   ",
        queue__rotational=rotational,
        queue__write_cache="write back",
        **{f"device__device__{name}": text for name, text in lanes.items()},
    )


def said(devices: tuple[Device, ...], under: Mount | None = None) -> list[Finding]:
    return list(device_findings(under or mount("ext4"), devices))


def test_the_drive_of_a_partition_is_described(tmp_path):
    drive = nvme(tmp_path)
    part = drive / "nvme0n1p2"
    part.mkdir()
    (part / "partition").write_text("2\n")
    numbered(tmp_path, "259:2", part)
    (device,) = devices_of(mount("ext4", number="259:2"), tmp_path)
    assert (device.name, device.kind, device.model) == ("nvme0n1", "NVMe", "Some Fast SSD 2TB")
    (found,) = said((device,))
    assert found.verdict is Verdict.OK
    assert "PCIe 16.0 GT/s x4" in found.found


def test_missing_lanes_are_noted(tmp_path):
    (found,) = said((describe(nvme(tmp_path, width="2")),))
    assert found.verdict is Verdict.NOTE
    assert "PCIe 16.0 GT/s x2, at most 16.0 GT/s x4" in found.found


def test_a_rotating_drive_is_warned_about(tmp_path):
    disk = block(tmp_path, "pci/ata1", "sda", queue__rotational="1", device__vendor="ATA")
    (found,) = said((describe(disk),))
    assert found.verdict is Verdict.WARNING
    assert "rotates" in found.found


def test_of_a_virtual_disk_nothing_is_claimed(tmp_path):
    disk = block(tmp_path, "pci/virtio1", "vda", queue__rotational="1")
    scsi = block(tmp_path, "pci/host0", "sdb", queue__rotational="1", device__vendor="QEMU")
    for found in said((describe(disk), describe(scsi))):
        assert found.verdict is Verdict.UNKNOWN
        assert "rotates" not in found.found


def test_every_drive_under_a_raid_or_an_encrypted_volume_is_named(tmp_path):
    disks = [block(tmp_path, "pci/ata1", name, queue__rotational="1") for name in ("sda", "sdb")]
    array = block(tmp_path, "virtual/block", "md0", queue__rotational="1")
    volume = block(tmp_path, "virtual/block", "dm-0", dm__name="secret", dm__uuid="CRYPT-LUKS2-x")
    for folder, parts in ((array, disks), (volume, [array])):
        (folder / "slaves").mkdir()
        for part in parts:
            (folder / "slaves" / part.name).symlink_to(part)
    device = describe(volume)
    assert device.name == "secret"
    assert "CRYPT" in device.kind
    assert [leaf.name for leaf in device.leaves()] == ["sda", "sdb"]
    assert [f.verdict for f in said((device,))] == [Verdict.OK, Verdict.WARNING, Verdict.WARNING]


def test_a_file_system_over_several_drives_names_all_of_them(tmp_path):
    folder = tmp_path / "fs" / "btrfs" / "a-b-c" / "devices"
    folder.mkdir(parents=True)
    for name in ("sda", "sdb"):
        (folder / name).symlink_to(block(tmp_path, "pci/ata1", name, queue__rotational="0"))
    found = devices_of(mount("btrfs", source="/dev/sdb"), tmp_path)
    assert [device.name for device in found] == ["sda", "sdb"]


def test_a_device_that_cannot_be_seen_is_unknown(tmp_path):
    pool = mount("zfs", source="tank/data")
    (found,) = said(devices_of(pool, tmp_path), under=pool)
    assert found.verdict is Verdict.UNKNOWN
    assert "tank/data" in found.found


# -- wear ----------------------------------------------------------------------------------------


def health_log(*, critical: int = 0, used: int = 0, units: int = 0, hours: int = 0) -> bytes:
    log = bytearray(512)
    log[0], log[5] = critical, used
    log[48:64] = units.to_bytes(16, "little")
    log[128:144] = hours.to_bytes(16, "little")
    return bytes(log)


def test_wear_and_writes_imply_what_a_drive_is_rated_for():
    worn = parse_nvme(health_log(used=25, units=300_000_000, hours=8760))
    assert worn.written_nbytes == 300_000_000 * 512_000  # 153.6 TB
    assert worn.rated_nbytes == 4 * worn.written_nbytes
    found = wear_finding("nvme0n1", worn)
    assert found.verdict is Verdict.OK
    assert "25 %" in found.found
    assert "154 TB written" in found.found
    assert "614 TB (estimated" in found.found
    assert "8,760 hours" in found.found


def test_hardly_any_wear_estimates_nothing():
    assert parse_nvme(health_log(used=0, units=1000)).rated_nbytes is None
    assert parse_nvme(health_log(used=1, units=10**8)).rated_nbytes is None
    assert "estimated" not in wear_finding("x", parse_nvme(health_log(used=1, units=10**8))).found


def test_a_worn_out_drive_is_a_warning_and_a_failing_one_a_problem():
    assert wear_finding("x", parse_nvme(health_log(used=130))).verdict is Verdict.WARNING
    failing = wear_finding("x", parse_nvme(health_log(critical=0b101, used=3)))
    assert failing.verdict is Verdict.PROBLEM
    assert "spare blocks below the threshold, reliability degraded" in failing.found
    hot = wear_finding("x", parse_nvme(health_log(critical=0b10)))
    assert hot.verdict is Verdict.WARNING
    assert "cooling" in hot.advice


def test_only_what_smartctl_has_decoded_is_believed():
    raw = {"ata_smart_attributes": {"table": [{"id": 177, "value": 3}]}}
    assert parse_smartctl(raw) == Wear()
    assert wear_finding("sda", Wear()).verdict is Verdict.UNKNOWN
    decoded = {
        "endurance_used": {"current_percent": 7},
        "power_on_time": {"hours": 12},
        "smart_status": {"passed": False},
    }
    worn = parse_smartctl(decoded)
    assert (worn.percent_used, worn.power_on_hours) == (7, 12)
    assert wear_finding("sda", worn).verdict is Verdict.PROBLEM


def test_the_command_to_the_kernel_has_the_size_that_its_number_says():
    import ctypes

    assert ctypes.sizeof(_NvmeCommand) == 0xC0484E41 >> 16 & 0x3FFF


def test_a_device_that_does_not_speak_nvme_is_unknown_and_the_reason_told(tmp_path):
    with loop_mount(tmp_path) as drive:
        with pytest.raises(OSError, match=r"\[Errno"):
            read_nvme(drive.device)
        device = Device(name=drive.device.name, kind="NVMe", virtual=False)
        (found,) = wear_findings((device,))
    assert found.verdict is Verdict.UNKNOWN
    assert drive.device.name in found.found


def test_smartctl_is_asked_where_it_is_and_told_to_be_missing_where_not(tmp_path, monkeypatch):
    device = Device(name="sda", kind="SCSI, SATA or USB disk", virtual=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = wear_findings((device,))
    assert found.verdict is Verdict.UNKNOWN
    assert "smartmontools" in found.advice
    program = tmp_path / "smartctl"
    program.write_text('#!/bin/sh\necho \'{"endurance_used": {"current_percent": 9}}\'\nexit 4\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (found,) = wear_findings((device,))
    assert "9 % of its rated endurance" in found.found


# -- burning -------------------------------------------------------------------------------------


def burned(*rates: float) -> Finding:
    gib = 1 << 30
    return burn_finding(
        Burn(nbytes=len(rates) * gib, bin_nbytes=gib, rates=tuple(rates), sync_s=0.1)
    )


def test_a_drive_that_falls_when_its_cache_is_full_is_seen():
    found = burned(*[5e9] * 20, *[0.8e9] * 44)
    assert found.verdict is Verdict.WARNING
    assert "fell from 5 GB/s to 0.8 GB/s after 20.0 GiB" in found.found
    assert found.values["fell_after_nbytes"] == 20 << 30
    assert found.values["written_bytes_per_s"][19:21] == [5e9, 0.8e9]


def test_a_dip_on_the_way_is_no_fall():
    assert burned(*[5e9] * 20, 1e9, *[5e9] * 20).verdict is Verdict.OK


def test_too_short_a_burn_claims_nothing():
    assert burned(5e9, 1e9).verdict is Verdict.UNKNOWN


def test_a_burn_shows_its_pace_and_leaves_nothing(tmp_path):
    with loop_mount(tmp_path, nbytes=700 * MIB) as drive:
        free = space(drive.point)[0]
        told = []
        result = burning.burn(drive.point, 256 * MIB, lambda done, total: told.append(done))
        assert (result.nbytes, told[-1]) == (256 * MIB, 256 * MIB)
        assert len(result.rates) == 4
        assert min(result.rates) > 0
        assert os.listdir(drive.point) == ["lost+found"]
        assert abs(space(drive.point)[0] - free) < MIB


def test_a_burn_never_fills_a_drive(tmp_path):
    with loop_mount(tmp_path, nbytes=256 * MIB) as drive:
        free = space(drive.point)[0]
        with pytest.raises(CapacityError, match="stay free; burn at most"):
            burning.check(drive.point, free, probe(drive.point))
        burning.check(drive.point, free // 2, probe(drive.point))


def test_a_burn_stops_when_others_use_up_the_space(tmp_path, monkeypatch):
    monkeypatch.setattr(burning, "_LOOK_EVERY", 16 * MIB)
    with loop_mount(tmp_path, nbytes=256 * MIB) as drive:
        result = burning.burn(drive.point, 220 * MIB, lambda done, total: None)
        assert result.nbytes < 220 * MIB
        assert "other programs" in result.cut


def test_memory_is_not_burned(tmp_path):
    with memory_mount(tmp_path, "tmpfs") as point, pytest.raises(RefusedError, match="is RAM"):
        burning.check(point, MIB, probe(point))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_an_interrupted_burn_leaves_nothing(tmp_path, number, code):
    with loop_mount(tmp_path, nbytes=3000 * MIB) as drive:
        free = space(drive.point)[0]
        arguments = ["--drive", str(drive.point), "--burn", "2GiB"]
        with subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            while space(drive.point)[0] > free - 32 * MIB:
                assert child.poll() is None, "it never wrote"
            child.send_signal(number)
            assert child.wait() == code
        assert os.listdir(drive.point) == ["lost+found"]
        assert abs(space(drive.point)[0] - free) < MIB
