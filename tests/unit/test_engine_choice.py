"""Which engine moves the shards, and what is said where it cannot be the one asked for."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatrain.config import changes, with_sets
from tests.support.libcuda import require_kvikio
from tests.support.runs import run_config
from tiering.backends.choice import find_kvikio, open_backends, require
from tiering.backends.driver import find_driver
from tiering.backends.posix import PosixBackend
from tiering.backends.probe import Access
from tiering.errors import UsageError

DIRECT = Access(direct=True, alignment=4096, filesystem="ext4", reason="tried, works")
BUFFERED = Access(direct=False, alignment=1, filesystem="tmpfs", reason="tmpfs is memory")


def run_python(code: str, *path: Path) -> str:
    """Return what a new process prints: in this one the stand-in for the driver may be loaded."""
    lines = [f"import sys; sys.path[:0] = {[str(p) for p in path]!r}", textwrap.dedent(code)]
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


REFUSAL = """
    from tiering.backends import choice
    from tiering.errors import RefusedError
    try:
        choice.require("kvikio")
    except RefusedError as error:
        print(error)
"""


def test_kvikio_that_is_not_installed_is_refused_with_the_way_out() -> None:
    said = run_python("import sys; sys.modules['kvikio'] = None" + textwrap.dedent(REFUSAL))
    assert said == (
        "kvikio: not installed: pip install 'megatrain[gds]'; or set store.io to posix\n"
    )


def test_kvikio_without_a_driver_is_refused_with_the_way_out() -> None:
    require_kvikio()
    code = "import ctypes\ntry: ctypes.CDLL('libcuda.so.1')\nexcept OSError: print('none')"
    if run_python(code) != "none\n":
        pytest.skip("there is a driver here")
    assert run_python(REFUSAL) == (
        "kvikio: no libcuda.so.1 on this machine: install NVIDIA's driver; or set store.io to "
        "posix\n"
    )


def test_kvikio_that_cannot_be_imported_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "kvikio").mkdir()
    failing = "raise RuntimeError('libcufile.so.0 was not found')"
    (tmp_path / "kvikio" / "__init__.py").write_text(failing)
    code = "from tests.support.libcuda import ensure_libcuda; ensure_libcuda()\n"
    said = run_python(code + textwrap.dedent(REFUSAL), tmp_path)
    assert said.startswith("kvikio: cannot be imported: libcufile.so.0 was not found; or set")


def test_kvikio_that_can_be_used_says_by_which_path() -> None:
    require_kvikio()
    found = find_kvikio()
    assert (found.installed, found.usable) == (True, True)
    assert found.said.startswith("kvikio 2")
    require("kvikio")


def test_auto_without_a_device_is_posix_and_imports_nothing() -> None:
    if find_driver().devices:
        pytest.skip("there is a device here")
    said = run_python("""
        import sys
        from tiering.backends.choice import open_backends
        from tiering.backends.probe import Access
        access = [Access(direct=True, alignment=4096, filesystem="ext4", reason="")]
        (backend,) = open_backends(["0"], access, engine="auto", writable=True, open_files=16)
        print(type(backend).__name__, "kvikio" in sys.modules)
    """)
    assert said == "PosixBackend False\n"


def test_a_drive_without_direct_io_is_left_to_posix_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    require_kvikio()
    from tiering.backends.kvikio import KvikioBackend

    with caplog.at_level(logging.INFO):
        backends = open_backends(
            ["4", "7"], [DIRECT, BUFFERED], engine="kvikio", writable=True, open_files=16
        )
    for backend in backends:
        backend.close()
    assert [type(backend) for backend in backends] == [KvikioBackend, PosixBackend]
    assert "drive 7: the posix engine, not kvikio: tmpfs is memory" in caplog.text
    assert caplog.text.count("shards move by kvikio 2") == 1


def test_the_run_file_knows_the_engines_and_a_change_of_it_is_harmless(tmp_path: Path) -> None:
    config = run_config(tmp_path, tmp_path, tmp_path)
    assert config.store.io == "auto"
    (change,) = changes(config, with_sets(config, ["store.io=kvikio"]))
    assert (str(change), change.harmless) == ("store.io: auto -> kvikio", True)
    with pytest.raises(UsageError, match=r"store\.io"):
        with_sets(config, ["store.io=uring"])
