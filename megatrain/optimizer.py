"""AdamW on the host, in pieces, with DeepSpeed's CPUAdam.

Two properties of the kernel shape this file. Its own bias correction is a running product while
steps follow each other and a power after a restart, so a resumed run would differ; we correct
learning rate, epsilon and weight decay ourselves and leave its correction off. And its vector
and scalar tails round differently, so a tensor is cut only at multiples of 16 elements from its
start, wherever its bytes live.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

log = logging.getLogger(__name__)
_STALE_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """The constants of one update of one tensor, already corrected for bias.

    With c1 = 1 - beta1^t and c2 = sqrt(1 - beta2^t), AdamW's step
    ``lr * (m / c1) / (sqrt(v) / c2 + eps)`` equals ``lr * c2 / c1 * m / (sqrt(v) + eps * c2)``
    (Kingma & Ba 2015, section 2, last paragraph). The kernel decays by lr * weight_decay, so
    that is scaled back by c1 / c2.
    """

    lr: float
    eps: float
    weight_decay: float

    @classmethod
    def at(
        cls, t: int, *, lr: float, betas: Sequence[float], eps: float, weight_decay: float
    ) -> AdamStep:
        """Return the constants of a tensor's ``t``-th update, counted from 1."""
        c1 = 1.0 - betas[0] ** t
        c2 = math.sqrt(1.0 - betas[1] ** t)
        return cls(lr=lr * c2 / c1, eps=eps * c2, weight_decay=weight_decay * c1 / c2)


class CpuAdam:
    """The kernel, loaded and configured. Not thread-safe: one lane calls it."""

    _ids: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, *, betas: Sequence[float], eps: float) -> None:
        self.betas = (float(betas[0]), float(betas[1]))
        self.eps = eps
        self._id = next(self._ids)
        self._kernel: Any = load_kernel()
        self._kernel.create_adam(self._id, 1e-3, *self.betas, eps, 0.0, True, False)

    def update(
        self,
        *,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        step: AdamStep,
    ) -> None:
        """Update ``master`` and both moments in place.

        All four are 1-D fp32 CPU tensors of one length, a piece of one tensor that starts at a
        multiple of 16 elements from the tensor's start.
        """
        self._kernel.adam_update(
            self._id,
            1,
            step.lr,
            *self.betas,
            step.eps,
            step.weight_decay,
            False,
            master,
            grad,
            exp_avg,
            exp_avg_sq,
        )

    def close(self) -> None:
        """Free the kernel's state."""
        self._kernel.destroy_adam(self._id)

    def __enter__(self) -> CpuAdam:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_kernel() -> Any:
    """Return DeepSpeed's compiled CPUAdam; the first call on a machine compiles it."""
    # the kernel runs on the host; without this its import looks for CUDA toolkits and talks
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    remove_stale_lock(build_folder(builder.name))
    return builder.load(verbose=False)


def build_folder(name: str) -> Path:
    """Return the folder in which torch compiles the extension ``name``."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def remove_stale_lock(folder: Path, *, patience_s: float = _STALE_AFTER_S) -> None:
    """Remove the lock that a killed build left in ``folder``; a running build keeps its own.

    torch's loader waits for the lock file to vanish, for ever. A lock is stale when it is older
    than ``patience_s`` and no compiler works in the folder.
    """
    lock = folder / "lock"
    while lock.exists() and not _compiler_in(folder):
        try:
            age_s = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if age_s >= patience_s:
            log.warning("removing %s: a build that was killed left it, nothing compiles", lock)
            lock.unlink(missing_ok=True)
            return
        time.sleep(min(0.2, patience_s))


def _compiler_in(folder: Path) -> bool:
    for process in psutil.process_iter(["cwd", "pid"]):
        cwd = process.info["cwd"]
        if cwd and process.info["pid"] != os.getpid() and Path(cwd) == folder:
            return True
    return False
