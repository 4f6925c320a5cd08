"""kvikio, which moves bytes between drives and a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatrain.doctor import trial
from megatrain.doctor.findings import Finding, Verdict
from tiering.backends.choice import Kvikio
from tiering.backends.driver import find_driver

_TRIAL = """
import dataclasses, json
from tiering.backends.choice import find_kvikio
print("\\n" + json.dumps(dataclasses.asdict(find_kvikio())))
"""


def gds_findings(procfs: Path = Path("/proc")) -> Iterator[Finding]:
    """Say whether kvikio is here, and by which path it moves bytes."""
    try:  # where its libraries do not fit each other or the driver it may take the process along
        found = Kvikio(**json.loads(trial.run(_TRIAL).splitlines()[-1]))
    except trial.TrialError as error:
        yield Finding(
            subject="kvikio",
            verdict=Verdict.WARNING,
            found=f"trying it in a process of its own: {error}",
            advice="reinstall it with the extra gds, or set store.io to posix",
        )
    else:
        yield kvikio_finding(found, devices=find_driver().devices)
    loaded = (procfs / "driver" / "nvidia-fs" / "version").exists()
    yield Finding(
        subject="nvidia-fs",
        verdict=Verdict.OK if loaded else Verdict.NONE,
        found="its kernel module is loaded" if loaded else "its kernel module is not loaded",
    )


def kvikio_finding(found: Kvikio, *, devices: int) -> Finding:
    """Say what a trial of kvikio means on a machine with so many GPUs."""
    if not found.installed or (not found.usable and not devices):
        said, advice = (found.said, "") if devices else (f"{found.said} (no GPU needs it here)", "")
        verdict = Verdict.NOTE if devices else Verdict.NONE
    elif found.usable:
        verdict, said, advice = Verdict.OK, found.said, ""
    else:
        verdict, said, advice = Verdict.WARNING, found.said, "or set store.io to posix"
    return Finding(
        subject="kvikio",
        verdict=verdict,
        found=said,
        advice=advice,
        values={"installed": found.installed, "usable": found.usable},
    )
