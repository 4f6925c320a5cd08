"""Which engine moves the shards of a store: the one that always works, or kvikio."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tiering.backends.driver import LIBRARY, find_driver
from tiering.backends.posix import File, PosixBackend
from tiering.backends.probe import Access
from tiering.errors import RefusedError

_log = logging.getLogger(__name__)

Engine = Literal["auto", "posix", "kvikio"]


class DriveBackend(Protocol):
    """Moves the files of one drive; ``direct`` if its transfers pass the page cache by."""

    @property
    def direct(self) -> bool:
        """Whether a file made for it is opened with O_DIRECT."""

    @property
    def alignment(self) -> int:
        """Offsets, lengths and addresses of a transfer are multiples of this; 1: any will do."""

    def read(self, path: File, offset: int, out: memoryview) -> Future[int]:
        """Fill ``out`` from ``offset``."""

    def write(self, path: File, offset: int, data: memoryview) -> Future[int]:
        """Write ``data`` at ``offset``."""

    def forget(self, path: Path) -> None:
        """Close a file that is about to be removed."""

    def close(self) -> None:
        """Wait for what is in flight and close every file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kvikio:
    """Whether kvikio can be used on this machine.

    Attributes:
        installed: It is there, usable or not.
        usable: It moved a byte when it was tried.
        said: By which path it moves bytes, or why it cannot and what would help.
    """

    installed: bool
    usable: bool
    said: str


def find_kvikio() -> Kvikio:
    """Try kvikio; that imports it, where it is installed."""
    if importlib.util.find_spec("kvikio") is None:
        said = "not installed: pip install 'megatrain[gds]'"
        return Kvikio(installed=False, usable=False, said=said)
    if not find_driver().present:
        said = f"no {LIBRARY} on this machine: install NVIDIA's driver"
        return Kvikio(installed=True, usable=False, said=said)
    try:
        from tiering.backends import kvikio
    except (ImportError, RuntimeError) as error:  # RuntimeError: a library that it needs
        return Kvikio(installed=True, usable=False, said=f"cannot be imported: {error}")
    failure = kvikio.try_it()
    said = f"fails with this driver: {failure}" if failure else kvikio.route()
    return Kvikio(installed=True, usable=not failure, said=said)


def require(engine: Engine) -> None:
    """Refuse an engine that was asked for by name and cannot be used here.

    Raises:
        RefusedError: It says what is missing.
    """
    if engine == "kvikio":
        _choose(engine)


def open_backends(
    names: Sequence[str],
    access: Sequence[Access],
    *,
    engine: Engine,
    writable: bool,
    open_files: int,
) -> list[DriveBackend]:
    """Return a backend for every drive; what was chosen is logged.

    ``auto`` is kvikio where it works and the driver sees a device, else posix. A drive without
    direct I/O is served by posix always: only what is aligned moves straight to a device.

    Raises:
        RefusedError: kvikio was asked for by name and cannot be used here.
    """
    by_kvikio = _choose(engine)
    if by_kvikio:
        _log.info("shards move by %s", by_kvikio.said)
    return [
        _kvikio_backend(name, len(names), writable, open_files)
        if by_kvikio and _allows_kvikio(name, found)
        else PosixBackend(
            name,
            direct=found.direct,
            alignment=found.alignment,
            writable=writable,
            open_files=open_files,
        )
        for name, found in zip(names, access, strict=True)
    ]


def _choose(engine: Engine) -> Kvikio | None:
    """Return kvikio if that is what moves the shards."""
    if engine == "posix" or (engine == "auto" and not find_driver().devices):
        return None
    found = find_kvikio()
    if found.usable:
        return found
    if engine == "kvikio":
        raise RefusedError(f"kvikio: {found.said}; or set store.io to posix")
    if found.installed:
        _log.warning("shards move by the posix engine: kvikio: %s", found.said)
    return None


def _allows_kvikio(name: str, found: Access) -> bool:
    if not found.direct:
        _log.warning("drive %s: the posix engine, not kvikio: %s", name, found.reason)
    return found.direct


def _kvikio_backend(name: str, drives: int, writable: bool, open_files: int) -> DriveBackend:
    from tiering.backends.kvikio import KvikioBackend

    return KvikioBackend(name, drives=drives, writable=writable, open_files=open_files)
