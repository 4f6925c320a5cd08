"""One large host allocation, made once, from which every buffer of a run is taken."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
from collections.abc import Mapping, Sequence
from types import TracebackType

from tiering.backends import cxl, pinned
from tiering.errors import CapacityError, RefusedError
from tiering.records import ALIGNMENT, round_up

_log = logging.getLogger(__name__)

_HUGE = 2 << 20
_MADV_POPULATE_WRITE = 23


class Arena:
    """``nbytes`` of private memory on transparent huge pages, faulted in, locked if possible.

    What ``take`` returns aliases the arena: views, arrays and tensors made of it must be gone
    before ``close``, which fails with ``BufferError`` rather than unmap memory under them.
    Not thread-safe.

    ``nodes`` are NUMA nodes that the memory has to lie on; by default it is local.

    Raises:
        CapacityError: There is no room for it.
        RefusedError: There is no such node, or the memory came to lie elsewhere.

    Attributes:
        nbytes: Bytes that can be taken.
        locked: Whether the pages cannot be swapped out.
        registered: Whether the GPU driver has page-locked them for asynchronous copies.
    """

    def __init__(self, nbytes: int, lock: bool = True, *, nodes: Sequence[int] = ()) -> None:
        self.nbytes = round_up(nbytes, ALIGNMENT)
        self.locked = self.registered = False
        self._taken: dict[str, int] = {}
        self._used = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        chosen = cxl.choose_nodes(nodes) if nodes else ()
        if chosen:
            cxl.require_room(self.nbytes, chosen)
        self._map = _mapped(self.nbytes + _HUGE)
        address = _address_of(self._map)
        self._start = -address % _HUGE
        self._address = address + self._start
        try:
            self._place([node.number for node in chosen])
        except BaseException:
            self._map.close()
            raise
        self.locked = lock and self._lock()
        if self.nbytes and pinned.cuda_in_use():
            self.registered = pinned.register(self._address, self.nbytes)

    def _place(self, nodes: Sequence[int]) -> None:
        if not self.nbytes:
            return
        if nodes:
            cxl.bind(self._address, self.nbytes, nodes)
        self._fault_in()
        if nodes and (elsewhere := self.nodes_found().keys() - set(nodes)):
            raise RefusedError(
                f"memory bound to NUMA nodes {list(nodes)} came to lie on {sorted(elsewhere)}"
            )

    def _fault_in(self) -> None:
        start, nbytes = ctypes.c_void_p(self._address), ctypes.c_size_t(self.nbytes)
        # Whole huge pages only: one at the end would take more memory than was asked for.
        whole = self.nbytes // _HUGE * _HUGE
        self._libc.madvise(start, ctypes.c_size_t(whole), mmap.MADV_HUGEPAGE)
        tail, left = ctypes.c_void_p(self._address + whole), len(self._map) - self._start - whole
        self._libc.madvise(tail, ctypes.c_size_t(left), mmap.MADV_NOHUGEPAGE)
        if self._libc.madvise(start, nbytes, _MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # touching the pages would end in a kill instead of an error
            raise CapacityError(
                f"cannot have {self.nbytes} B of memory: {os.strerror(code)}; lower memory.ram"
            )
        ctypes.memset(self._address, 0, self.nbytes)  # kernels before 5.14

    def _lock(self) -> bool:
        if self._libc.mlock(ctypes.c_void_p(self._address), ctypes.c_size_t(self.nbytes)) == 0:
            return True
        code = ctypes.get_errno()
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        _log.warning(
            "cannot lock %d B of host memory (%s), it may be swapped out: the limit is %d B; raise "
            "it with ulimit -l, memlock in /etc/security/limits.conf or LimitMEMLOCK of the unit",
            self.nbytes,
            os.strerror(code),
            soft,
        )
        return False

    def nodes_found(self) -> Mapping[int, int]:
        """Return how many pages of the arena lie on each NUMA node, as the kernel says."""
        return cxl.pages_by_node(self._address, self.nbytes)

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


def _mapped(nbytes: int) -> mmap.mmap:
    # The default, MAP_SHARED, never gets huge pages; what is cut off is never touched.
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(
            f"cannot have {nbytes} B of memory: {error.strerror}; lower memory.ram"
        ) from error


def _address_of(pages: mmap.mmap) -> int:
    # What lends the address is gone on return: kept, it would count as a view of the map.
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))
