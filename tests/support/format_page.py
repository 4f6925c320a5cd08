"""The programs that docs/format.md prints, run in processes that have nothing of ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def code_on_the_page(title: str) -> str:
    (code,) = re.findall(rf"```python {title}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(code)


def read_with_the_page(store: Path, role: str, folder: Path) -> dict[str, np.ndarray]:
    """Return what the printed reader reads, as bytes; ``folder`` is for what it writes."""
    program = (
        "import sys\n"
        f"{code_on_the_page('reader')}\n"
        "found = dict(read_tensors(sys.argv[1], sys.argv[2]))\n"
        "np.savez(sys.argv[3], **{k: np.atleast_1d(v).view('u1') for k, v in found.items()})\n"
        "assert not {'zarr', 'tiering', 'checkpoint', 'torch'} & set(sys.modules)\n"
    )
    out = folder / f"{role}.npz"
    done = _run(program, store, role, out)
    assert not done.returncode, done.stderr
    return dict(np.load(out))


def fault_of_the_page(store: Path) -> str:
    """Return what the printed comparison of all checksums ends with; nothing, if they fit."""
    program = (
        "import crc32c, sys\n"
        f"{code_on_the_page('reader')}\n{code_on_the_page('checker')}\n"
        "check(sys.argv[1], crc32c.crc32c)\n"
    )
    return _run(program, store).stderr


def _run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)
