"""The PCI Express link of a device, from sysfs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Speed of a lane and number of lanes, now and at most, in the kernel's words."""

    speed: str
    width: int
    max_speed: str
    max_width: int

    def __str__(self) -> str:
        """For people."""
        most = f"{self.max_speed} x{self.max_width}"
        now = f"{self.speed} x{self.width}"
        return f"PCIe {now}" if now == most else f"PCIe {now}, at most {most}"

    @property
    def narrow(self) -> bool:
        """Whether lanes are missing that the device has."""
        return self.width < self.max_width


def link(folder: Path) -> Link | None:
    """Return the link of the PCI device at ``folder`` of sysfs, or None if it has none to show."""
    try:
        width, most = (int((folder / f"{k}_link_width").read_text()) for k in ("current", "max"))
        speed, fastest = ((folder / f"{k}_link_speed").read_text() for k in ("current", "max"))
    except (OSError, ValueError):
        return None
    if not 0 < width <= most < 255 or "Unknown" in speed + fastest:  # virtual machines show those
        return None
    return Link(speed=_short(speed), width=width, max_speed=_short(fastest), max_width=most)


def _short(speed: str) -> str:
    return speed.strip().removesuffix(" PCIe")
