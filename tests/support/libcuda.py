"""A driver for machines that have none, so that the real kvikio moves bytes of host memory."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


def require_kvikio() -> None:
    """Skip where kvikio is not installed; after this it can be used in this process."""
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed: there is no wheel of it for this machine")
    ensure_libcuda()


@cache
def ensure_libcuda() -> None:
    """Load the stand-in for the driver, unless there is a driver.

    It stays loaded, and kvikio finds it by the name that it has inside. Harmless to torch, which
    was built without CUDA or is told that there is no device.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with tempfile.TemporaryDirectory() as folder:
            ctypes.CDLL(str(_compiled(Path(folder))))


def _compiled(folder: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no driver here, and no C compiler to make the stand-in for one")
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library
