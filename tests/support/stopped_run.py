"""A run on a tiny model that was stopped before its end."""

from __future__ import annotations

import os
from pathlib import Path

from megatrain import run
from megatrain.config import load_run
from megatrain.trainer import Row, Stop
from tests.support.runs import Quiet, tiny_llama, token_rows


def make(folder: str, step: str) -> None:
    """Make model and data in ``folder``, and run its ``run.yaml`` from there until ``step``."""
    os.chdir(folder)
    tiny_llama(Path("models/my-model"))
    token_rows(Path("train.jsonl"))
    stop = Stop()

    def after(row: Row) -> None:
        if row["step"] == int(step):
            stop.request()

    run.train(load_run(Path("run.yaml")), Quiet(after), stop)
