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


def read_with_the_page(
    store: Path, role: str, folder: Path, *, checked: bool = False
) -> dict[str, np.ndarray]:
    """Return what the printed reader reads, as bytes; ``folder`` is for what it writes."""
    crc32c = "__import__('crc32c').crc32c" if checked else "None"
    program = (
        "import sys\n"
        f"{code_on_the_page('reader')}\n"
        f"found = dict(read_tensors(sys.argv[1], sys.argv[2], {crc32c}))\n"
        "np.savez(sys.argv[3], **{k: np.atleast_1d(v).view('u1') for k, v in found.items()})\n"
        "assert not {'zarr', 'tiering', 'checkpoint', 'torch'} & set(sys.modules)\n"
    )
    out = folder / f"{role}.npz"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(store), role, str(out)],
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    return dict(np.load(out))
