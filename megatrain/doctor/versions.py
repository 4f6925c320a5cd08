"""Which software this is."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from megatrain.doctor.findings import Finding, Verdict

_PACKAGES = ("torch", "deepspeed", "zarr", "transformers", "numpy")


def version_findings() -> Iterator[Finding]:
    """Say the versions of kernel, Python and what matters most of the rest."""
    yield _known("kernel", f"{platform.system()} {platform.release()} on {platform.machine()}")
    yield _known("python", f"{platform.python_version()} ({platform.python_implementation()})")
    try:
        yield _known("megatrain", version("megatrain"))
    except PackageNotFoundError:
        found = "runs from its source folder, not installed as a package"
        yield Finding(subject="megatrain", verdict=Verdict.NOTE, found=found)
    for name in _PACKAGES:
        yield _package(name)


def _known(subject: str, found: str) -> Finding:
    return Finding(subject=subject, verdict=Verdict.OK, found=found)


def _package(name: str) -> Finding:
    try:
        return _known(name, version(name))
    except PackageNotFoundError:
        return Finding(
            subject=name,
            verdict=Verdict.PROBLEM,
            found="not installed",
            advice=f"pip install {name}",
        )
