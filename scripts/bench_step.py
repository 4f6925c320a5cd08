"""Compare MegaTrain's step with plain transformers on the same samples, in turn, as ratios.

Plain: the whole model in RAM in the compute dtype, activation recompute, fp32 masters and torch's
fused AdamW. One step of each in turn, so that a noisy machine is as noisy for both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megatrain import run
from megatrain.config import RunConfig
from megatrain.trainer import Row, Stop


class Plain:
    """Transformers and torch alone."""

    def __init__(self, folder: Path, dtype: torch.dtype, lr: float) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
        recompute = {"use_reentrant": False}
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=recompute)
        self.weights = list(self.model.parameters())
        same = dtype == torch.float32
        self.masters = (
            self.weights
            if same
            else [torch.nn.Parameter(weight.detach().float()) for weight in self.weights]
        )
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, weight_decay=0.0, fused=True)

    def step(self, ids: torch.Tensor) -> float:
        """Return the seconds of one update."""
        began = time.perf_counter()
        with torch.enable_grad():
            self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if self.masters is not self.weights:
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.weights:
            with torch.no_grad():
                for master, weight in zip(self.masters, self.weights, strict=True):
                    weight.copy_(master)
        return time.perf_counter() - began


class InTurn:
    """Watches a run and makes a plain step after each of its steps."""

    def __init__(self, plain: Plain, ids: torch.Tensor) -> None:
        self.plain, self.ids = plain, ids
        self.pairs: list[tuple[float, float]] = []
        self._pause_s = 0.0

    def on_conversion(self, plan: object) -> None:
        pass

    def on_converted(self, done: int, total: int) -> None:
        pass

    def on_plan(self, plan: Any, state: object, slots: int) -> None:
        self.tiers = {str(tier): nbytes for tier, nbytes in plan.tiers.items()}

    def on_step(self, row: Row) -> None:
        ours = row["step_s"] - self._pause_s
        began = time.perf_counter()
        theirs = self.plain.step(self.ids)
        self._pause_s = time.perf_counter() - began
        self.pairs.append((ours, theirs))
        print(f"step {row['step']}: ours {ours:.2f} s, plain {theirs:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ram", default="8GiB", help="memory.ram of our run")
    parser.add_argument("--resident", default="auto", help="memory.resident of our run")
    parser.add_argument("--commit-every", type=int, default=1_000_000)
    args = parser.parse_args()
    words = json.loads((args.model / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, words, (args.batch, args.length), generator=generator)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="."))
    try:
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids.tolist()))
        resident = int(args.resident) if args.resident.isdigit() else args.resident
        memory = {"ram": args.ram, "resident": resident}
        document = {
            "model": str(args.model),
            "out": str(folder / "run"),
            "data": {"train": str(data), "max_seq_len": args.length, "shuffle": False},
            "train": {
                "steps": args.steps,
                "micro_batch": args.batch,
                "accumulate": 1,
                "lr": 1e-5,
                "schedule": "constant",
                "warmup_steps": 0,
                "dtype": args.dtype,
            },
            "memory": memory,
            "store": {"commit_every": args.commit_every},
        }
        watcher = InTurn(Plain(args.model, getattr(torch, args.dtype), 1e-5), ids)
        run.train(RunConfig.from_json(json.dumps(document)), watcher, Stop())
    finally:
        shutil.rmtree(folder)
    steady = watcher.pairs[1:]  # the first pays for first touches, and the first read is checked
    ratios = sorted(ours / theirs for ours, theirs in steady)
    print(
        f"{args.dtype}, {args.batch} x {args.length} tokens, state {watcher.tiers}: "
        f"ours {statistics.median(o for o, _ in steady):.2f} s, "
        f"plain {statistics.median(t for _, t in steady):.2f} s, "
        f"median ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


if __name__ == "__main__":
    main()
