from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hf_folders import SINGLE, make_llama

MEASURE = """
import sys
from pathlib import Path
from checkpoint.convert import convert
from checkpoint.export import export_hf

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def forget_peak(plan=None):
    global start
    Path("/proc/self/clear_refs").write_text("5")
    start = status("VmRSS")

source, store, out = map(Path, sys.argv[1:])
convert(source, store, ram=1 << 20, on_plan=forget_peak)
print(status("VmHWM") - start)
forget_peak()
export_hf(store, out)
print(status("VmHWM") - start)
"""


@pytest.mark.parametrize("vocabulary", [600_000])
def test_memory_does_not_grow_with_a_tensor(tmp_path: Path, vocabulary: int) -> None:
    tensors = make_llama(tmp_path / "model", vocab_size=vocabulary, tie=True)
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert largest > 36 << 20  # and twice that as a master
    arguments = [str(tmp_path / name) for name in ("model", "store", "out")]
    command = [sys.executable, "-c", MEASURE, *arguments]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": "."}, check=True, capture_output=True, text=True
    )
    convert_nbytes, export_nbytes = map(int, ended.stdout.split())
    assert filecmp.cmp(*(tmp_path / name / SINGLE for name in ("model", "out")), shallow=False)
    assert convert_nbytes < 12 << 20
    assert export_nbytes < 24 << 20
