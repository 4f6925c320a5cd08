"""What torch and the driver say about GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from checkpoint.sizes import format_size
from megatrain.doctor.findings import Finding, Verdict
from megatrain.doctor.pci import link
from tiering.backends.driver import LIBRARY, find_driver

_BF16_SINCE = 8  # compute capability
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def gpu_findings(sysfs: Path = Path("/sys"), procfs: Path = Path("/proc")) -> Iterator[Finding]:
    """Say which GPUs there are and whether torch can use them."""
    import torch

    cards = nvidia_cards(sysfs)
    usable, why = _usable()
    if usable:
        yield _driver_finding(procfs)
        for number in range(torch.cuda.device_count()):
            yield _device_finding(number, sysfs)
    elif cards or find_driver().devices:
        yield unused_finding(cards, built_for=torch.version.cuda, why=why)
    else:
        yield Finding(
            subject="GPU",
            verdict=Verdict.NONE,
            found="no NVIDIA device on the PCI bus and none that torch can use; training runs on "
            "the CPU",
        )


def nvidia_cards(sysfs: Path) -> list[str]:
    """Return the PCI addresses of NVIDIA's display and compute devices."""
    found = []
    for folder in sorted((sysfs / "bus" / "pci" / "devices").glob("*")):
        try:
            vendor, kind = ((folder / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY):
            found.append(folder.name)
    return found


def _usable() -> tuple[bool, str]:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return False, "this torch is built for CPUs only"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return False, str(error).splitlines()[0]
    return torch.cuda.device_count() > 0, "torch sees no device"


def unused_finding(cards: list[str], *, built_for: str | None, why: str) -> Finding:
    """Say that there is a GPU which torch cannot use."""
    where = f"an NVIDIA device at {', '.join(cards)}" if cards else f"{LIBRARY} sees a device"
    return Finding(
        subject="GPU",
        verdict=Verdict.WARNING,
        found=f"{where}, but torch cannot use it: {why}; training would run on the CPU",
        advice=_unused_advice(built_for),
    )


def _unused_advice(built_for: str | None) -> str:
    if built_for is None:
        return "install torch for CUDA (pytorch.org)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which may hide it: unset it"
    return f"install a driver for CUDA {built_for}, and look at nvidia-smi"


def _driver_finding(procfs: Path) -> Finding:
    import torch

    try:
        text = (procfs / "driver" / "nvidia" / "version").read_text().splitlines()[0]
        said = text.partition(":")[2].strip()
    except (OSError, IndexError):
        said = "its version is not shown here"
    runtime = torch.version.cuda or torch.version.hip
    return Finding(
        subject="driver",
        verdict=Verdict.OK,
        found=f"{said}; torch {torch.__version__} is built for {runtime}",
    )


def _device_finding(number: int, sysfs: Path) -> Finding:
    import torch

    about = torch.cuda.get_device_properties(number)
    native = torch.version.hip is not None or about.major >= _BF16_SINCE
    facts = [about.name, _memory(number, about.total_memory)]
    path = _link(about, sysfs)
    facts += [path] if path else []
    return Finding(
        subject=f"GPU {number}",
        verdict=Verdict.OK if native else Verdict.WARNING,
        found=", ".join(facts) + ("" if native else "; no bfloat16 in hardware"),
        advice="" if native else "train.dtype: float32, or a newer GPU",
        values={"name": about.name, "total_nbytes": about.total_memory},
    )


def _memory(number: int, total: int) -> str:
    import torch

    try:
        free, _ = torch.cuda.mem_get_info(number)
    except RuntimeError as error:  # taken exclusively by another process, or broken
        return f"{format_size(total)}, not usable now: {str(error).splitlines()[0]}"
    return f"{format_size(total)}, {format_size(free)} of it free"


def _link(about: object, sysfs: Path) -> str:
    numbers = [getattr(about, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    if min(numbers) < 0:  # an older torch
        return ""
    address = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    found = link(sysfs / "bus" / "pci" / "devices" / address)
    return f"{found} (a link slows down while it is idle)" if found else ""
