from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "transformers", "deepspeed", "zarr", "kvikio", "ml_dtypes", "numcodecs", "pytest"}


def test_the_store_imports_nothing_heavy() -> None:
    code = (
        "import sys, tiering.store, tiering.pool, tiering.scratch, tiering.arena\n"
        "import tiering.codecs, tiering.backends.zarr3\n"
        f"print(*sorted({HEAVY!r} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == ""
