"""The real model: same bits wherever its state lives, within the memory that was planned."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.run import METRICS_FILE
from tests.support.runs import Quiet, numbers, run_config, token_rows, train
from tiering.records import Tier
from tiering.store import open_reader

PARAMETERS = 134_515_008
VOCABULARY = 49_152
GIB = 1 << 30
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="the samples extra is not installed")
    folder = tmp_path_factory.mktemp("model") / "SmolLM2-135M-Instruct"
    script = REPOSITORY / "scripts" / "make_model.py"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    return folder


def checksums(store: Path) -> dict[str, Any]:
    """Return the crc32c of every chunk of every record: 1.8 GiB in two pages."""
    with open_reader(store) as reader:
        return {name: reader.checksums(name).tolist() for name in reader.records}


DISK = {"memory__resident": 1, "memory__gradients": "disk"}
MIXES = {
    "all in RAM": {"memory__ram": "6GiB"},
    "half and half": {"memory__ram": "3GiB", "memory__resident": "900MiB"},
    # in slabs that are much smaller than the largest tensor; those of the others hold it
    "all on disk": DISK | {"memory__ram": "1GiB", "memory__slab": "1MiB"},
}


@pytest.mark.slow
def test_three_steps_give_the_same_bits_wherever_the_state_lives(tmp_path, smollm2):
    data = token_rows(tmp_path / "rows.jsonl", vocab=VOCABULARY)
    results, tiers = {}, {}
    for name, memory in MIXES.items():
        out = tmp_path / name.replace(" ", "-")
        config = run_config(
            smollm2,
            data,
            out,
            data__max_seq_len=32,
            train__dtype="bfloat16",
            train__micro_batch=2,
            train__accumulate=1,
            **memory,
        )
        seen = train(config)
        results[name] = (checksums(out / "store"), numbers(out))
        tiers[name] = seen.plan.tiers if seen.plan else {}
        shutil.rmtree(out)
    assert results["all in RAM"][0].keys() == seen.plan.records.keys()
    for name in MIXES:
        assert results[name] == results["all in RAM"], name
    assert tiers["all in RAM"].get(Tier.NVME, 0) == 0
    assert tiers["all on disk"].get(Tier.PINNED, 0) == 0
    assert 0.4 < tiers["half and half"][Tier.PINNED] / (14 * PARAMETERS) < 0.6


PEAK = """
import sys
from megatrain.cli import cli
try:
    cli(["train", sys.argv[1]])
finally:
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_with_all_state_on_disk_the_process_stays_below_900_mebibytes(tmp_path, smollm2):
    data = tmp_path / "rows.jsonl"
    generator = np.random.default_rng(0)
    rows = [generator.integers(3, VOCABULARY, 256).tolist() for _ in range(4)]
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    config = run_config(
        smollm2,
        data,
        tmp_path / "run",
        data__max_seq_len=256,
        train__dtype="bfloat16",
        train__steps=2,
        train__micro_batch=2,
        train__accumulate=1,
        train__loss_chunk=128,
        memory__ram="256MiB",
        memory__workspace="auto",
    )
    path = tmp_path / "run.yaml"
    path.write_text(config.to_json())
    # with a thread for each core, as a user's run has them, also where tests share the cores
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", PEAK, path]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak = 1024 * int(done.stdout.split("VmHWM:")[1].split()[0])
    assert peak <= 0.9 * GIB
    printed = re.search(r"this process at most +([\d.]+) MiB", done.stderr)
    assert printed
    assert 0.85 <= peak / (float(printed[1]) * 2**20) <= 1.0
    for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines():
        row = json.loads(line)
        # 14 and 2 for the gradient's way to disk; 16 and 2 to read
        assert row["written_bytes"]["nvme"] == pytest.approx(16 * PARAMETERS, rel=0.01)
        assert row["read_bytes"]["nvme"] <= 18 * PARAMETERS * 1.01
    shutil.rmtree(tmp_path / "run")


def test_the_plan_says_before_anything_is_allocated_what_a_step_moves(tmp_path, smollm2):
    class Enough(Exception):
        pass

    class Planned(Quiet):
        def on_plan(self, plan, state, slots):
            super().on_plan(plan, state, slots)
            raise Enough

    seen = Planned()
    config = run_config(
        smollm2,
        token_rows(tmp_path / "rows.jsonl"),
        tmp_path / "run",
        train__dtype="bfloat16",
        memory__ram="1GiB",
        memory__resident=1,
        memory__gradients="disk",
    )
    with pytest.raises(Enough):
        train(config, seen)
    assert seen.plan
    moved = seen.plan.traffic[Tier.NVME]
    assert moved.written == pytest.approx(16 * PARAMETERS, rel=0.01)
    assert moved.read <= 18 * PARAMETERS * 1.01
