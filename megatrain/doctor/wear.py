"""How worn a drive is: SMART, as far as the drive shows it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.doctor.device import Device
from megatrain.doctor.findings import Finding, Verdict

_ADMIN_COMMAND = 0xC0484E41  # linux/nvme_ioctl.h: _IOWR('N', 0x41, struct nvme_admin_cmd)
_GET_LOG_PAGE = 0x02
_HEALTH_LOG = 0x02
_ALL_NAMESPACES = 0xFFFFFFFF
_LOG_NBYTES = 512
_UNIT_NBYTES = 512_000  # a data unit is 1000 blocks of 512 bytes
_WORN_PERCENT = 80
_ENOUGH_PERCENT = 5  # the percentage is a whole number: less wear than this estimates nothing
_PATIENCE_S = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """What a drive says of itself; None where it does not.

    Attributes:
        percent_used: Of the endurance that the maker rated, by the drive's own estimate; can
            exceed 100.
        failures: What it calls critical, in words.
        temperature_off: Whether it is too hot or too cold right now.
    """

    percent_used: int | None = None
    written_nbytes: int | None = None
    power_on_hours: int | None = None
    media_errors: int | None = None
    failures: tuple[str, ...] = ()
    temperature_off: bool = False

    @property
    def rated_nbytes(self) -> int | None:
        """What wear and writes so far imply of the rated endurance; an estimate."""
        if not self.written_nbytes or (self.percent_used or 0) < _ENOUGH_PERCENT:
            return None
        assert self.percent_used
        return self.written_nbytes * 100 // self.percent_used


class _NvmeCommand(ctypes.Structure):
    """The struct nvme_admin_cmd of linux/nvme_ioctl.h."""

    _fields_ = (
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("reserved", ctypes.c_uint16),
        ("namespace", ctypes.c_uint32),
        ("words_2_3", ctypes.c_uint32 * 2),
        ("metadata", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("metadata_length", ctypes.c_uint32),
        ("data_length", ctypes.c_uint32),
        ("words_10_15", ctypes.c_uint32 * 6),
        ("timeout_ms", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
    )


_TEMPERATURE_BIT = 1
_FAILURES = {
    0: "spare blocks below the threshold",
    2: "reliability degraded",
    3: "read-only",
    4: "backup of its volatile memory failed",
    5: "persistent memory read-only",
}


def read_nvme(path: Path) -> Wear:
    """Return what the NVMe drive at ``path`` says in its SMART / health log page.

    Raises:
        OSError: Not permitted, or not an NVMe drive.
    """
    log = ctypes.create_string_buffer(_LOG_NBYTES)
    command = _NvmeCommand(
        opcode=_GET_LOG_PAGE,
        namespace=_ALL_NAMESPACES,
        address=ctypes.addressof(log),
        data_length=_LOG_NBYTES,
    )
    command.words_10_15[0] = (_LOG_NBYTES // 4 - 1) << 16 | _HEALTH_LOG
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = fcntl.ioctl(fd, _ADMIN_COMMAND, command)
    finally:
        os.close(fd)
    if status:
        raise OSError(errno.EIO, f"the drive answers with NVMe status {status:#x}")
    return parse_nvme(log.raw)


def parse_nvme(log: bytes) -> Wear:
    """Return what a log page 02h says (NVM Express Base Specification, SMART / Health)."""

    def counter(offset: int) -> int:
        return int.from_bytes(log[offset : offset + 16], "little")

    return Wear(
        percent_used=log[5],
        written_nbytes=counter(48) * _UNIT_NBYTES,
        power_on_hours=counter(128),
        media_errors=counter(160),
        failures=tuple(text for bit, text in _FAILURES.items() if log[0] >> bit & 1),
        temperature_off=bool(log[0] >> _TEMPERATURE_BIT & 1),
    )


def read_smartctl(path: Path, program: str) -> Wear:
    """Return what smartctl can say of the drive at ``path``.

    Raises:
        OSError: It could not open the drive, or said nothing of use.
    """
    command = [program, "--json", "--all", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=False)
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise OSError(errno.EIO, f"smartctl did not answer: {error}") from error
    if done.returncode & 0b11:  # smartctl(8): command line did not parse, device open failed
        messages = answer.get("smartctl", {}).get("messages", [])
        said = "; ".join(str(m.get("string")) for m in messages) or "it does not say why"
        raise OSError(errno.EIO, f"smartctl cannot open it: {said}")
    return parse_smartctl(answer)


def parse_smartctl(answer: dict[str, Any]) -> Wear:
    """Return what a JSON document of smartctl says."""
    passed = answer.get("smart_status", {}).get("passed")
    return Wear(
        # vendors give the same attribute number different meanings: only what smartctl has decoded
        percent_used=answer.get("endurance_used", {}).get("current_percent"),
        power_on_hours=answer.get("power_on_time", {}).get("hours"),
        failures=("its self-assessment failed",) if passed is False else (),
    )


def wear_findings(devices: tuple[Device, ...], dev: Path = Path("/dev")) -> Iterator[Finding]:
    """Say how worn the drives at the bottom are."""
    for device in (leaf for top in devices for leaf in top.leaves()):
        yield _finding(device, dev / device.name)


def _finding(device: Device, node: Path) -> Finding:
    if device.virtual or device.backing or device.kind.startswith("RAM"):
        why = "a virtual device" if device.virtual else device.kind
        return _unseen(device, f"{why} has no SMART; that of a drive behind it is out of sight")
    smartctl = shutil.which("smartctl")
    if device.kind != "NVMe" and not smartctl:
        return _unseen(device, "smartctl is not installed", "apt-get install smartmontools")
    try:
        worn = read_nvme(node) if device.kind == "NVMe" else read_smartctl(node, smartctl or "")
    except PermissionError:
        return _unseen(device, f"{node} may only be asked by root", "run this command as root once")
    except OSError as error:
        return _unseen(device, f"{node}: {error.strerror}")
    return wear_finding(device.name, worn)


def _unseen(device: Device, why: str, advice: str = "") -> Finding:
    found = f"{device.name}: {why}"
    return Finding(subject="wear", verdict=Verdict.UNKNOWN, found=found, advice=advice)


def wear_finding(name: str, worn: Wear) -> Finding:
    """Say what a drive says of itself."""
    facts = list(_facts(worn))
    verdict, advice = _verdict(worn)
    return Finding(
        subject="wear",
        verdict=verdict if facts else Verdict.UNKNOWN,
        found=f"{name}: {', '.join(facts) or 'its SMART data name no wear that is standardised'}",
        advice=advice,
        values={
            "percent_used": worn.percent_used,
            "written_nbytes": worn.written_nbytes,
            "power_on_hours": worn.power_on_hours,
            "estimated_rated_nbytes": worn.rated_nbytes,
        },
    )


def _facts(worn: Wear) -> Iterator[str]:
    yield from worn.failures
    if worn.temperature_off:
        yield "too hot or too cold now"
    if worn.percent_used is not None:
        yield f"{worn.percent_used} % of its rated endurance used, by its own estimate"
    if worn.written_nbytes is not None:
        yield f"{_terabytes(worn.written_nbytes)} written"
    if worn.rated_nbytes is not None:
        yield f"so rated for about {_terabytes(worn.rated_nbytes)} (estimated from the two)"
    if worn.power_on_hours is not None:
        yield f"{worn.power_on_hours:,} hours on"
    if worn.media_errors:
        yield f"{worn.media_errors} errors of its medium"


def _terabytes(nbytes: int) -> str:
    return f"{nbytes / 1e12:.3g} TB"


def _verdict(worn: Wear) -> tuple[Verdict, str]:
    if worn.failures:
        return Verdict.PROBLEM, "copy what is on it elsewhere and replace it"
    if worn.temperature_off:
        return Verdict.WARNING, "it slows down to protect itself: see to its cooling"
    if (worn.percent_used or 0) >= _WORN_PERCENT or worn.media_errors:
        return Verdict.WARNING, "a step writes 14 bytes a parameter: have a replacement at hand"
    return Verdict.OK, ""
