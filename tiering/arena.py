"""One large host allocation, made once, from which every buffer of a run is taken."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
from types import TracebackType

from tiering.backends import pinned
from tiering.errors import CapacityError
from tiering.records import ALIGNMENT, round_up

_log = logging.getLogger(__name__)

_HUGE = 2 << 20
_MADV_POPULATE_WRITE = 23


class Arena:
    """``nbytes`` of private memory on transparent huge pages, faulted in, locked if possible.

    What ``take`` returns aliases the arena: views, arrays and tensors made of it must be gone
    before ``close``, which fails with ``BufferError`` rather than unmap memory under them.
    Not thread-safe.

    Attributes:
        nbytes: Bytes that can be taken.
        locked: Whether the pages cannot be swapped out.
        registered: Whether the GPU driver has page-locked them for asynchronous copies.
    """

    def __init__(self, nbytes: int, lock: bool = True) -> None:
        self.nbytes = round_up(nbytes, ALIGNMENT)
        self._taken: dict[str, int] = {}
        self._used = 0
        span = round_up(max(self.nbytes, 1), _HUGE)
        # The default, MAP_SHARED, never gets huge pages; what is cut off is never touched.
        self._map = mmap.mmap(-1, span + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = _address_of(self._map)
        self._start = -address % _HUGE
        self._address = address + self._start
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fault_in(span)
        self.locked = lock and self._lock()
        self.registered = pinned.cuda_in_use() and pinned.register(self._address, self.nbytes)

    def _fault_in(self, span: int) -> None:
        start = ctypes.c_void_p(self._address)
        self._libc.madvise(start, ctypes.c_size_t(span), mmap.MADV_HUGEPAGE)
        nbytes = ctypes.c_size_t(self.nbytes)
        if self._libc.madvise(start, nbytes, _MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # touching the pages would end in a kill instead of an error
            self._map.close()
            raise CapacityError(
                f"cannot have {self.nbytes} B of memory: {os.strerror(code)}; lower memory.ram"
            )
        ctypes.memset(self._address, 0, self.nbytes)  # kernels before 5.14

    def _lock(self) -> bool:
        if self._libc.mlock(ctypes.c_void_p(self._address), ctypes.c_size_t(self.nbytes)) == 0:
            return True
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        _log.warning(
            "cannot lock %d B in memory (%s), it may be swapped out: the limit is %d B; raise it "
            "with ulimit -l or memlock in limits.conf",
            self.nbytes,
            os.strerror(ctypes.get_errno()),
            soft,
        )
        return False

    @property
    def free_nbytes(self) -> int:
        """What can still be taken."""
        return self.nbytes - self._used

    def take(self, name: str, nbytes: int) -> memoryview:
        """Return ``nbytes`` zeroed, writable bytes at a 4096-aligned address, never given twice.

        Raises:
            CapacityError: The arena was made too small.
        """
        if name in self._taken:
            raise ValueError(f"arena: {name} was taken already")
        room = round_up(nbytes, ALIGNMENT)
        if room > self.free_nbytes:
            raise CapacityError(
                f"arena full: {name} needs {room} B, {self.free_nbytes} of {self.nbytes} B free"
            )
        start = self._start + self._used
        self._used += room
        self._taken[name] = nbytes
        return memoryview(self._map)[start : start + nbytes]

    def table(self) -> list[tuple[str, int]]:
        """Return name and size of everything taken, in order."""
        return list(self._taken.items())

    def close(self) -> None:
        """Give the memory back to the system.

        Raises:
            BufferError: Something made of ``take`` is still alive; the arena stays usable.
        """
        if self._map.closed:
            return
        if self.registered:
            pinned.unregister(self._address)
            self.registered = False
        try:
            self._map.close()
        except BufferError as error:
            taken = ", ".join(self._taken)
            raise BufferError(f"arena is still in use by views of: {taken}") from error

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except BufferError as leak:  # the traceback of ``error`` keeps views alive: let it speak
            _log.debug("%s", leak)


def _address_of(pages: mmap.mmap) -> int:
    # What lends the address is gone on return: kept, it would count as a view of the map.
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))
