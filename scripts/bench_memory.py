"""Peak memory of a whole training process, and the bytes that its steps move, per parameter."""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
model: {model}
out: {folder}/run
data: {{train: {folder}/rows.jsonl, max_seq_len: {length}}}
train: {{steps: {steps}, micro_batch: {batch}, accumulate: 1, warmup_steps: 0}}
memory: {{ram: {ram}}}
"""

PEAK = """
from megatrain.cli import cli
try:
    cli()
finally:
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def parameters(model: Path) -> int:
    """Return the number of elements in the folder's only weights file."""
    with (model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return sum((b - a) // 2 for a, b in (tensor["data_offsets"] for tensor in header.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face folder with one bf16 file")
    parser.add_argument("--ram", default="256MiB")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=".")).resolve()
    try:
        rng = random.Random(0)
        words = json.loads((args.model / "config.json").read_text())["vocab_size"]
        rows = [[rng.randrange(3, words) for _ in range(args.length)] for _ in range(8)]
        lines = (json.dumps({"input_ids": row}) + "\n" for row in rows)
        (folder / "rows.jsonl").write_text("".join(lines))
        settings = vars(args) | {"folder": folder, "model": args.model.resolve()}
        (folder / "run.yaml").write_text(RUN.format(**settings))
        command = [sys.executable, "-c", PEAK, "train", str(folder / "run.yaml")]
        pipe = subprocess.PIPE
        done = subprocess.run(command, check=True, stdout=pipe, stderr=pipe, text=True)
        sys.stderr.write(done.stderr)
        peak = int(done.stdout.split("VmHWM:")[1].split()[0]) / 1024
        planned = re.search(r"this process at most +(\S+ \S+)", done.stderr)
        print(
            f"memory.ram {args.ram}: peak RSS of the whole process {peak:.0f} MiB, planned "
            f"{planned[1] if planned else 'nothing'}"
        )
        count = parameters(args.model)
        for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            read, written = row["read_bytes"]["nvme"], row["written_bytes"]["nvme"]
            print(
                f"step {row['step']}: read {read / count:.3f} B, written {written / count:.3f} B "
                f"a parameter, {row['step_s']:.1f} s"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
