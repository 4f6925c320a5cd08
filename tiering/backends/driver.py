"""NVIDIA's driver on this machine: whether it is here, and how many devices it sees."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

LIBRARY = "libcuda.so.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What the driver's library says of itself."""

    present: bool
    devices: int


def find_driver() -> Driver:
    """Return what can be said without torch; a driver without a device counts none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return Driver(present=False, devices=0)
    count = ctypes.c_int(0)
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return Driver(present=True, devices=0)
    return Driver(present=True, devices=count.value)
