"""What this process has in memory, as the kernel counts it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): VmHWM becomes VmRSS
_SAMPLE_S = 0.001


def status_nbytes(field: str) -> int:
    """Return a field of /proc/self/status that counts memory, such as VmRSS, in bytes."""
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    return 0


def resident_nbytes() -> int:
    """Return what of this process lies in memory now: its own pages and those of its libraries."""
    return int(_STATM.read_text().split()[1]) * _PAGE


class PeakMeter:
    """Measures the most that is resident between two laps; to be entered.

    The kernel's own mark is reset and read where that is allowed; elsewhere a thread looks once
    a millisecond, and shorter peaks go unseen.

    Attributes:
        exact: Whether the kernel keeps the peak.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self.exact = exact and self._reset()
        self._seen = 0
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="peak", daemon=True)

    def __enter__(self) -> PeakMeter:
        if self.exact:
            self._reset()
        else:
            self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if not self.exact:
            self._sampler.join()

    def lap(self) -> int:
        """Return the peak in bytes since the last call, or since the start."""
        if self.exact:
            peak = status_nbytes("VmHWM")
            self._reset()
            return peak
        peak, self._seen = max(self._seen, resident_nbytes()), 0
        return peak

    @staticmethod
    def _reset() -> bool:
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:
            return False
        return True

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self._seen = max(self._seen, resident_nbytes())
