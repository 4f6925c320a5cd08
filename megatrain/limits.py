"""What this machine can give a run, against what its plan asks for."""

from __future__ import annotations

import torch

from megatrain.ops import DEVICE_ARENAS
from megatrain.planner import Plan
from tiering.errors import CapacityError
from tiering.limits import memory_limit


def require_memory(plan: Plan, device: torch.device) -> None:
    """Return if the planned arenas fit this machine's memory, and its GPU's.

    Raises:
        CapacityError: They do not; the message has both numbers and where the limit is set.
    """
    limit = memory_limit()
    if plan.host_nbytes > limit.nbytes:
        raise CapacityError(
            f"the plan takes {plan.host_nbytes / 2**30:.2f} GiB of host memory, {limit.source} "
            f"allows {limit.nbytes / 2**30:.2f} GiB; lower memory.ram or memory.resident"
        )
    if device.type == "cuda":
        _require_device(plan, device)


def _require_device(plan: Plan, device: torch.device) -> None:
    wanted = sum(sum(slabs) for name, slabs in plan.arenas.items() if name in DEVICE_ARENAS)
    free, _ = torch.cuda.mem_get_info(device)
    if wanted > free:
        raise CapacityError(
            f"the plan takes {wanted / 2**30:.2f} GiB on {device}, {free / 2**30:.2f} GiB are "
            "free; lower train.micro_batch, train.accumulate or data.max_seq_len"
        )
