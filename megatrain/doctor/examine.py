"""Everything that the doctor looks at, in the order in which it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatrain.doctor.adam import adam_findings
from megatrain.doctor.burn import Progress
from megatrain.doctor.drive import check_burn, drive_section, shared_section
from megatrain.doctor.findings import Finding, Section, looked_at
from megatrain.doctor.gds import gds_findings
from megatrain.doctor.gpu import gpu_findings
from megatrain.doctor.memory import memory_findings
from megatrain.doctor.nodes import node_findings
from megatrain.doctor.packages import package_findings
from megatrain.doctor.pages import page_findings
from megatrain.doctor.versions import version_findings

Subject = tuple[str, Callable[[], Iterable[Finding]]]


def examine(
    drives: Sequence[Path], *, burn: int | None, on_progress: Progress
) -> Iterator[Section]:
    """Yield what is found, section by section.

    Raises:
        RefusedError: A drive cannot be burned; nothing was looked at.
    """
    folders = [drive.resolve() for drive in drives]
    if burn is not None:
        for folder in folders:
            check_burn(folder, burn)
    yield from _sections(_MACHINE)
    for folder in folders:
        yield drive_section(folder, burn=burn, on_progress=on_progress)
    shared = shared_section(folders) if len(folders) > 1 else None
    if shared:
        yield shared
    yield from _sections(_PROGRAMS)


def _sections(subjects: Iterable[tuple[str, Sequence[Subject]]]) -> Iterator[Section]:
    for title, looks in subjects:
        found = [finding for subject, look in looks for finding in looked_at(subject, look)]
        yield Section(title=title, findings=tuple(found))


_MACHINE: tuple[tuple[str, Sequence[Subject]], ...] = (
    ("memory", (("memory", memory_findings), ("huge pages", page_findings))),
    ("NUMA and CXL", (("NUMA", node_findings),)),
)
_PROGRAMS: tuple[tuple[str, Sequence[Subject]], ...] = (
    ("GPU", (("GPU", gpu_findings), ("kvikio", gds_findings))),
    ("optimizer", (("CPU Adam", adam_findings),)),
    (
        "programs",
        (("names", lambda: package_findings(Path.cwd())), ("versions", version_findings)),
    ),
)
