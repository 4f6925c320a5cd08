"""The one door through which every durable operation goes.

Each function is one step of a protocol: it either did what its name says or raised a
``StorageError``. Order and durability are the caller's: nothing here syncs more than it says.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from tiering.errors import StorageError

UNFINISHED = ".unfinished"  # ends the name of a file that is still being written

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

Buffer = memoryview | bytes | bytearray


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A step with what is needed to take it again elsewhere; most need the path alone.

    Attributes:
        path: The file, folder or link that it acts on; the new name of a rename.
        offset: Where ``data`` is written.
        nbytes: The length that a file gets, or how much of it is reserved.
        source: The old name of a rename, the other one of an exchange, or what a link says.
    """

    action: str
    path: Path
    offset: int = 0
    data: bytes = b""
    nbytes: int = 0
    source: str = ""


Observer = Callable[[str, Path], None]
Ended = Callable[[], None]
Recorder = Callable[[Operation], Ended]

_observer: ContextVar[Observer | None] = ContextVar("fsops_observer", default=None)
_recorder: ContextVar[Recorder | None] = ContextVar("fsops_recorder", default=None)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call ``observer(action, path)`` just before every step taken in this context.

    An ``OSError`` that it raises counts as the failure of the step.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Call ``recorder(operation)`` as every step in this context begins.

    What it returns is called when the step has succeeded. Unlike an observer it also gets the
    data that backends write for this context, from threads of theirs.
    """
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextmanager
def _step(
    action: str,
    path: Path,
    *,
    offset: int = 0,
    data: Iterable[Buffer] = (),
    nbytes: int = 0,
    source: str = "",
) -> Iterator[None]:
    try:
        observer, recorder = _observer.get(), _recorder.get()
        if observer is not None:
            observer(action, path)
        if recorder is None:
            yield
            return
        ended = recorder(
            Operation(
                action=action,
                path=path,
                offset=offset,
                data=b"".join(data),
                nbytes=nbytes,
                source=source,
            )
        )
        yield
        ended()
    except OSError as error:
        raise StorageError(action, path, errno=error.errno or 0) from error


def begin_write(file: Path | int, offset: int, data: memoryview) -> Ended:
    """Record a write that a backend is about to make; call what is returned when it is made.

    A descriptor without a path is of a file that has no name: nothing of it outlives a crash.
    """
    recorder = _recorder.get()
    if recorder is None or isinstance(file, int):
        return _nothing
    return recorder(Operation(action="write", path=file, offset=offset, data=bytes(data)))


def _nothing() -> None:
    pass


@contextmanager
def _descriptor(path: Path, flags: int, action: str = "open") -> Iterator[int]:
    with _step(action, path):
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def make_dir(path: Path) -> None:
    """Create one folder; its parent exists and it does not."""
    with _step("create folder", path):
        path.mkdir()


def make_dirs(path: Path) -> list[Path]:
    """Create a folder and what is missing above it, and return those; their names are durable.

    So is that of the lowest one that is there: a kill may have come before that was.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()][::-1]
    lowest = missing[0].parent if missing else path
    if os.access(lowest.parent, os.R_OK):
        fsync_dir(lowest.parent)
    for folder in missing:
        with _step("create folder", folder):
            folder.mkdir(exist_ok=True)  # somebody else may be at it
        fsync_dir(folder.parent)
    return missing


def write_file(path: Path, data: bytes) -> None:
    """Create ``path`` with exactly ``data``, durable once its folder is synced."""
    with _descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "create") as fd:
        _write_all(fd, path, data)
        with _step("fsync", path):
            os.fsync(fd)


def replace_file(path: Path, data: bytes, *, fresh: Path) -> None:
    """Give ``path`` exactly ``data``, in one step; durable when this returns.

    ``fresh``, in the same folder, is the name of the new content until then. What a kill left
    there is removed.
    """
    unlink(fresh, missing_ok=True)
    write_file(fresh, data)
    replace(fresh, path)
    fsync_dir(path.parent)


def create_file(path: Path, data: bytes) -> None:
    """Create ``path`` with exactly ``data``, durable after a ``sync_drive``."""
    with _descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "create") as fd:
        _write_all(fd, path, data)


def create_sparse(path: Path, nbytes: int, tail: bytes) -> None:
    """Create a file of ``nbytes`` that ends with ``tail``, the rest a hole that reads as zeros.

    Durable after a ``sync_drive``.
    """
    with _descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "create") as fd:
        _write_all(fd, path, tail, offset=nbytes - len(tail))


def _write_all(fd: int, path: Path, data: bytes, offset: int = 0) -> None:
    view = memoryview(data)
    with (
        _step("write", path, offset=offset, data=[view]),
        _span("write", path, offset, len(view)) as span,
    ):
        while span.moved < len(view):
            span.add(os.pwrite(fd, view[span.moved :], offset + span.moved))


@dataclass(slots=True)
class _Span:
    """How many bytes of a step were moved."""

    moved: int = 0

    def add(self, moved: int) -> None:
        """Count bytes; a call that moves none and does not fail would be made for ever."""
        if moved <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.moved += moved


@contextmanager
def _span(action: str, path: Path, offset: int, wanted: int) -> Iterator[_Span]:
    """Lend what counts the bytes of a step, so that its error tells how far it came."""
    span = _Span()
    try:
        yield span
    except OSError as error:
        raise StorageError(
            action,
            path,
            errno=error.errno or 0,
            offset=offset + span.moved,
            wanted=wanted,
            moved=span.moved,
        ) from error


class NewFile:
    """A file that is created here and written from its start; its owner closes it.

    Its bytes are durable after a sync of the file or its drive, its name after one of its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        with _step("create", path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, *parts: Buffer) -> None:
        """Write ``parts`` one after another behind what was appended before."""
        views = [memoryview(part).cast("B") for part in parts]
        wanted = sum(map(len, views))
        start, path = self.nbytes, self.path
        with (
            _step("write", path, offset=start, data=views),
            _span("write", path, start, wanted) as span,
        ):
            while span.moved < wanted:
                moved = os.pwritev(self._fd, views, self.nbytes)
                span.add(moved)
                self.nbytes += moved
                while views and moved >= len(views[0]):
                    moved -= len(views.pop(0))
                if views:
                    views[0] = views[0][moved:]

    def close(self) -> None:
        """Close it, if it is open."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with _step("close", self.path):
                os.close(fd)


class Replacement:
    """A file that takes the place of ``path`` when it is finished; until then nothing of it shows.

    It is written from its start under a temporary name beside ``path``, or beside the file that
    ``path`` is a link to, and is durable after a ``sync_drive``. There may be one at a time for
    each path: what an earlier one left behind when its process was killed is taken over.
    """

    def __init__(self, path: Path) -> None:
        self._target = Path(os.path.realpath(path))
        temporary = self._target.with_name(self._target.name + UNFINISHED)
        unlink(temporary, missing_ok=True)
        self._file = NewFile(temporary)

    def append(self, *parts: Buffer) -> None:
        """Write ``parts`` one after another behind what was appended before."""
        self._file.append(*parts)

    def finish(self) -> None:
        """Close the file and give it its name, in one step."""
        self._file.close()  # before the name: network file systems report failed writes here
        replace(self._file.path, self._target)

    def discard(self) -> None:
        """Close and remove a file that was not finished."""
        try:
            self._file.close()
        finally:
            unlink(self._file.path, missing_ok=True)


def append(path: Path, data: bytes) -> None:
    """Write ``data`` behind what ``path`` holds, which is created if need be; not durable."""
    with _descriptor(path, os.O_WRONLY | os.O_CREAT) as fd:
        _write_all(fd, path, data, offset=os.fstat(fd).st_size)


def rewrite_in_place(fd: int, path: Path, data: bytes) -> None:
    """Give an open file the content ``data``; neither atomic nor durable."""
    with _step("truncate", path):
        os.ftruncate(fd, 0)
    _write_all(fd, path, data)


def open_file(path: Path, flags: int) -> int:
    """Return a descriptor of ``path``; the caller closes it."""
    with _step("open", path):
        return os.open(path, flags | os.O_CLOEXEC, 0o666)


def replace(source: Path, target: Path) -> None:
    """Rename ``source`` over ``target`` in one step, durable once the folder is synced."""
    with _step("rename", target, source=str(source)):
        os.replace(source, target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, durable once their folders are synced; False if it cannot be.

    Raises:
        StorageError: It could be, and failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    try:
        with _step("exchange", other, source=str(one)):
            if libc.renameat2(*names, _RENAME_EXCHANGE) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
    except StorageError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True


def symlink(target: str, path: Path) -> None:
    """Create the link ``path`` to ``target``, durable once its folder is synced."""
    with _step("link", path, source=target):
        os.symlink(target, path)


def unlink(path: Path, *, missing_ok: bool = False) -> None:
    """Remove the name ``path``."""
    with _step("remove", path):
        path.unlink(missing_ok=missing_ok)


def remove_dir(path: Path) -> None:
    """Remove an empty folder."""
    with _step("remove", path):
        path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove ``path`` and all below it, following no link; nothing happens if it is absent."""
    if path.is_symlink() or path.is_file():
        unlink(path)
    elif path.is_dir():
        for child in _children(path):
            remove_tree(child)
        remove_dir(path)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise StorageError("remove", folder, errno=error.errno or 0) from error


def fsync_file(path: Path) -> None:
    """Make content and length of ``path`` durable."""
    with _descriptor(path, os.O_RDONLY) as fd, _step("fsync", path):
        os.fsync(fd)


def fsync_open(fd: int, path: Path) -> None:
    """Make content and length of an open file durable."""
    with _step("fsync", path):
        os.fsync(fd)


def fsync_dir(path: Path) -> None:
    """Make the names in the folder ``path`` durable."""
    with _descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as fd, _step("fsync folder", path):
        os.fsync(fd)


def sync_drive(fd: int, path: Path) -> None:
    """Make everything on the file system of ``fd`` durable.

    ``fd`` must have been opened before the writes: the kernel reports a failed write-back once to
    each descriptor that was open when it happened. The fdatasync after it is for file systems
    whose syncfs does not flush the drive's cache when their log has nothing to write.
    """
    with _step("sync", path):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        os.fdatasync(fd)


def reserve(path: Path, nbytes: int) -> None:
    """Give the first ``nbytes`` of a file blocks on its drive; what is read does not change.

    A failure leaves the length as it was: ext4 keeps a file grown when it runs out of space.
    """
    with _descriptor(path, os.O_RDWR) as fd:
        before = os.fstat(fd).st_size
        try:
            with (
                _step("reserve", path, nbytes=nbytes),
                _span("reserve", path, 0, nbytes),
            ):
                os.posix_fallocate(fd, 0, nbytes)
        except StorageError:
            with _step("truncate", path, nbytes=before):
                os.ftruncate(fd, before)
            raise


def truncate(path: Path, nbytes: int) -> None:
    """Set the length of ``path``."""
    with _step("truncate", path, nbytes=nbytes):
        os.truncate(path, nbytes)


def filesystem_type(path: Path) -> str:
    """Return the type of the file system of ``path`` as the kernel names it, or "unknown".

    The mount is asked for, not the device: on btrfs each subvolume has one that no mount names.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        about = Path(f"/proc/self/fdinfo/{fd}").read_text().split()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    finally:
        os.close(fd)
    mount = about[about.index("mnt_id:") + 1]
    types = (line.partition(" - ")[2].split()[0] for line in mounts if line.split()[0] == mount)
    return next(types, "unknown")


def raise_open_file_limit(wanted: int) -> int:
    """Raise the soft limit of open files towards ``wanted`` and return what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= wanted:
        return wanted
    target = wanted if hard == unlimited else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return target
