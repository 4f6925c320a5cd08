"""Files read and written by NVIDIA's kvikio: to host memory, or straight to device memory.

Importing this module imports kvikio, which the extra ``gds`` installs. The files are those of
the posix backend, byte for byte. kvikio never syncs: what was written is durable after a sync of
its drive, as with any other backend.
"""

from __future__ import annotations

import errno
import logging
import math
import mmap
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import kvikio
import kvikio.cufile_driver
import kvikio.defaults
import kvikio.statistics
import numpy as np

from tiering import fsops
from tiering.backends.driver import find_driver
from tiering.backends.open_files import OpenFiles
from tiering.backends.posix import (
    OPEN_FILES,
    File,
    PosixBackend,
    require_aligned,
)
from tiering.errors import StorageError
from tiering.records import ALIGNMENT

_log = logging.getLogger(__name__)

THREADS = 2
_TASK_NBYTES = 8 << 20
_TRIAL_NBYTES = 4 << 20
_NVIDIA_FS = Path("/proc/driver/nvidia-fs")
_UDEV = Path("/run/udev")


class DeviceBuffer(Protocol):
    """Contiguous device memory; a torch tensor of bytes on a GPU is one."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        """Address, shape and type, as CUDA's libraries hand them to each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One transfer; it keeps the buffer alive, which kvikio's futures do not."""

    action: str
    path: Path
    offset: int
    buffer: memoryview | DeviceBuffer
    nbytes: int


class KvikioBackend:
    """Moves bytes between buffers and the files of one drive. Thread-safe.

    The drive must allow direct I/O. Offsets and lengths are multiples of 4096, addresses in host
    memory too: that moves without a copy. ``threads`` requests are under way at a time; kvikio
    cuts them into pieces for its one pool of threads, which the ``drives`` of a store share.
    """

    direct = True

    def __init__(
        self,
        name: str,
        *,
        writable: bool,
        drives: int = 1,
        threads: int = THREADS,
        open_files: int = OPEN_FILES,
    ) -> None:
        _tune(threads * drives)
        # For descriptors, and to learn why kvikio failed: it only says so in words.
        self._plain = PosixBackend(
            name, direct=True, writable=writable, threads=threads, open_files=open_files // 2
        )
        flags = "r+" if writable else "r"
        self._files: OpenFiles[Any] = OpenFiles(
            lambda path: kvikio.CuFile(path, flags),
            lambda file: file.close(),
            max(1, open_files // 4),  # kvikio opens each file twice
        )
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"kvikio-{name}")
        self._monitor = kvikio.statistics.SummaryMonitor()

    @property
    def alignment(self) -> int:
        """Offsets, lengths and host addresses of a transfer are multiples of this many bytes."""
        return ALIGNMENT

    def read(self, path: File, offset: int, out: memoryview) -> Future[int]:
        """Fill ``out`` with the bytes at ``offset``; it is borrowed until the future ends.

        Raises:
            ValueError: ``out`` is read-only or misaligned. kvikio itself would write into it.
            StorageError: In the future: the file is missing, ends early or cannot be read.
        """
        if out.readonly:
            raise ValueError(f"cannot read {path} into a read-only buffer of {out.nbytes} B")
        if isinstance(path, int):
            return self._plain.read(path, offset, out)
        return self._submit_host("read", path, offset, out)

    def write(self, path: File, offset: int, data: memoryview) -> Future[int]:
        """Write ``data`` at ``offset`` of an existing file; it is borrowed until the future ends.

        Durable after a sync of the drive.
        """
        if isinstance(path, int):
            return self._plain.write(path, offset, data)
        return self._submit_host("write", path, offset, data)

    def read_device(self, path: Path, offset: int, out: DeviceBuffer) -> Future[int]:
        """Fill device memory with the bytes at ``offset``; it is borrowed until the future ends.

        No kernel or copy that uses ``out`` may be under way: streams are not waited for. After
        an error the content of ``out`` is undefined, and the error says how far the file goes.
        """
        return self._submit_device("read", path, offset, out)

    def write_device(self, path: Path, offset: int, data: DeviceBuffer) -> Future[int]:
        """Write device memory at ``offset``; whatever computes ``data`` must be finished."""
        return self._submit_device("write", path, offset, data)

    def forget(self, path: Path) -> None:
        """Close a file that is about to be removed."""
        self._files.forget(path)
        self._plain.forget(path)

    def close(self) -> None:
        """Wait for what is in flight, close every file and log the path that was taken."""
        self._threads.shutdown(wait=True)
        self._plain.close()
        self._files.close()
        self._monitor.stop()
        _log.info("%s", self.path_taken())

    def path_taken(self) -> str:
        """Return how bytes can move here, and how many requests of this process really did so."""
        ran = self._monitor.get().by_backend
        return f"{route()}; so far {ran['GDS']['num_ops']} by cuFile, {ran['POSIX']['num_ops']} not"

    # -- submitting ----------------------------------------------------------------------------

    def _submit_host(self, action: str, path: Path, offset: int, view: memoryview) -> Future[int]:
        view = view.cast("B")
        require_aligned(path, offset, view, self.alignment)
        return self._submit(
            _Request(action=action, path=path, offset=offset, buffer=view, nbytes=len(view))
        )

    def _submit_device(
        self, action: str, path: Path, offset: int, buffer: DeviceBuffer
    ) -> Future[int]:
        described = buffer.__cuda_array_interface__
        nbytes = math.prod(described["shape"]) * np.dtype(described["typestr"]).itemsize
        if action == "read" and described["data"][1]:
            raise ValueError(f"cannot read {path} into a read-only buffer of {nbytes} B")
        if offset % ALIGNMENT or nbytes % ALIGNMENT:  # any device address will do
            raise ValueError(
                f"direct I/O on {path}: offset {offset} and length {nbytes} must be multiples of "
                f"{ALIGNMENT}"
            )
        return self._submit(
            _Request(action=action, path=path, offset=offset, buffer=buffer, nbytes=nbytes)
        )

    def _submit(self, request: _Request) -> Future[int]:
        ended = None
        if request.action == "write" and isinstance(request.buffer, memoryview):
            ended = fsops.begin_write(request.path, request.offset, request.buffer)
        return self._threads.submit(self._transfer, request, ended)

    def _transfer(self, request: _Request, ended: fsops.Ended | None) -> int:
        if not request.nbytes:
            return 0
        try:
            moved = self._move(request)
            failure = f"moved {moved} of {request.nbytes} B"
        except (RuntimeError, OSError) as error:
            moved, failure = -1, str(error)
        if moved != request.nbytes:
            self._settle(request, failure)
        if ended is not None:
            ended()  # here, so that whoever waits for the future comes after it
        return request.nbytes

    def _move(self, request: _Request) -> int:
        # This frame holds the handle, the buffer and kvikio's future until the last has ended. A
        # buffer that goes earlier is a crash, a handle that is closed earlier fails the transfer.
        with self._files.lease(request.path) as file:
            submit: Callable[..., Any] = file.pread if request.action == "read" else file.pwrite
            future = submit(request.buffer, request.nbytes, request.offset)
            return int(future.get())

    # -- failing -------------------------------------------------------------------------------

    def _settle(self, request: _Request, failure: str) -> None:
        """Make a transfer that failed again without kvikio, which tells only in words why.

        Raises:
            StorageError: It fails again, now with an errno and a place; or the buffer is in
                device memory, which only kvikio reaches.
        """
        if isinstance(request.buffer, memoryview):
            move = self._plain.read if request.action == "read" else self._plain.write
            move(request.path, request.offset, request.buffer).result()
            _log.warning(
                "%s of %s: %d B at offset %d moved without kvikio, which failed: %s",
                request.action,
                request.path,
                request.nbytes,
                request.offset,
                failure,
            )
            return
        self._try_without_device(request)
        raise StorageError(
            request.action,
            request.path,
            errno=errno.EIO,
            offset=request.offset,
            wanted=request.nbytes,
            hint=f"kvikio: {failure}; the same bytes do move between drive and host memory",
        )

    def _try_without_device(self, request: _Request) -> None:
        """Read the range; before a write, also write again what it holds."""
        pages = memoryview(mmap.mmap(-1, _TRIAL_NBYTES, flags=mmap.MAP_PRIVATE))
        for at in range(0, request.nbytes, _TRIAL_NBYTES):
            self._try_piece(request, at, pages[: request.nbytes - at])

    def _try_piece(self, request: _Request, at: int, piece: memoryview) -> None:
        offset = request.offset + at
        piece[:] = bytes(len(piece))
        try:
            error = self._plain.read(request.path, offset, piece).exception()
            # A write may go where the file is not yet.
            ends = isinstance(error, StorageError) and error.errno == 0
            if error is not None and not (ends and request.action == "write"):
                raise error
            if request.action == "write":
                self._plain.write(request.path, offset, piece).result()
        except StorageError as error:
            raise StorageError(
                error.action,
                request.path,
                errno=error.errno,
                offset=max(error.offset, offset),  # one before the first byte has no offset
                wanted=request.nbytes,
                moved=at + error.moved,
            ) from error


# -- the library as a whole ----------------------------------------------------------------------


def _tune(threads: int) -> None:
    """Give kvikio, whose settings are the process's, those of this backend."""
    if not find_driver().devices:
        # Else, where /run/udev exists, opening a file asks cuFile for a device and never returns.
        kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON)
    kvikio.defaults.set(
        {
            "task_size": _TASK_NBYTES,
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
    )
    if kvikio.defaults.get("num_threads") < threads:
        kvikio.defaults.set("num_threads", threads)


def try_it() -> str:
    """Return why kvikio cannot move a byte on this machine, or nothing if it can."""
    _tune(1)
    byte = bytearray(1)  # kept until the transfer is over
    try:
        with kvikio.CuFile(kvikio.__file__, "r") as file:
            file.pread(byte, 1, 0).get()
    except RuntimeError as error:
        return str(error)
    return ""


def route() -> str:
    """Return by which path device memory is reached; host memory always goes by direct I/O."""
    version = f"kvikio {kvikio.__version__}"
    why = _why_compatible()
    if why:
        return f"{version} in compatibility mode, through host memory: {why}"
    cufile = ".".join(map(str, kvikio.cufile_driver.libcufile_version()))
    if _NVIDIA_FS.exists() and kvikio.cufile_driver.get("is_gds_available"):
        return f"{version}, GPUDirect Storage: cuFile {cufile} with nvidia-fs"
    return (
        f"{version}, cuFile {cufile} without nvidia-fs: direct where it can use PCI peer-to-peer "
        "transfers, else through host memory"
    )


def _why_compatible() -> str:
    if not find_driver().devices:
        return "the driver sees no device"
    if not kvikio.defaults.is_compat_mode_preferred():
        return ""
    if kvikio.defaults.get("compat_mode") == kvikio.CompatMode.ON:
        return "KVIKIO_COMPAT_MODE asks for it"
    if not _UDEV.is_dir():
        return f"{_UDEV} is missing; a container needs --volume /run/udev:/run/udev:ro"
    return "cuFile cannot be used here"
