"""Check a run's metrics: every step exactly once, and the loss clearly fallen."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--epoch", type=int, required=True, help="steps of an epoch")
    parser.add_argument(
        "--learned", type=float, required=True, help="last loss over first, at most"
    )
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.metrics.read_text().splitlines()]
    steps = [row["step"] for row in rows]
    if steps != list(range(1, args.steps + 1)):
        sys.exit(f"{args.metrics} has the steps {steps}, expected 1 to {args.steps} once each")
    losses = [row["loss"] for row in rows]
    first, last = mean(losses[: args.epoch]), mean(losses[-args.epoch :])
    print(
        f"steps 1 to {args.steps}, once each; loss of the first epoch {first:.3f}, last {last:.3f}"
    )
    if not last <= args.learned * first:
        sys.exit(f"the loss has not fallen to {args.learned:.0%} of what it was")


if __name__ == "__main__":
    main()
