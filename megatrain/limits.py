"""What this machine can give a run, against what its plan asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint.schema import Schema
from megatrain import knobs, workspace
from megatrain.config import RunConfig
from megatrain.footprint import RAISE_LOCK, Footprint, Workspace
from megatrain.planner import Plan, needs
from tiering.backends.posix import THREADS_PER_DRIVE
from tiering.errors import CapacityError
from tiering.limits import Limit, in_memory, lock_limit, memory_limit
from tiering.process import resident_nbytes, status_nbytes
from tiering.records import Record
from tiering.store import StoreWriter

LATER_NBYTES = 16 << 20  # pages of libraries that only the run itself touches
THREAD_NBYTES = 32 << 10  # of a thread that reads and writes: 24 KiB were measured

PlanOf = Callable[[RunConfig], Plan]
"""Plans other settings, to find out which of them would help."""


def measured(
    plan: Plan,
    schema: Schema,
    files: Mapping[str, bytes],
    config: RunConfig,
    device: torch.device,
    plan_of: PlanOf,
) -> Plan:
    """Return ``plan`` with its footprint; the computation is tried out to know it.

    ``files`` are the model's configuration, name to content.

    Raises:
        CapacityError: The run does not fit this machine's memory, its lock limit or its GPU.
    """
    drives = [_nearest(folder) for folder in config.store.drives or (config.out,)]
    share = sum(map(in_memory, drives)) / len(drives)
    stored = sum(record.padded_nbytes for record in plan.records.values())
    stored = round(share * (stored * (config.store.slots) + _scratch_nbytes(plan)))
    plan = replace(plan, footprint=_footprint(plan, config, Workspace(), stored))
    require_memory(plan, config, plan_of)  # before anything is taken to try the computation
    if config.memory.workspace == "auto":
        found = workspace.measure(plan, schema, files, config, device, room=_room(plan))
    else:
        found = Workspace(kept=config.memory.workspace)
    found = replace(found, threads=_threads_nbytes(len(drives)))
    plan = replace(plan, footprint=_footprint(plan, config, found, stored))
    require_memory(plan, config, plan_of)
    if device.type == "cuda":
        _require_device(plan, device)
    return plan


def recounted(plan: Plan, store: StoreWriter, config: RunConfig, plan_of: PlanOf) -> Plan:
    """Return ``plan`` with what the process has resident now, before its arenas are allocated.

    Raises:
        CapacityError: The run does not fit any more.
    """
    before = plan.footprint
    if before is None:
        raise ValueError("the workspace of the plan was not measured")
    workspace.settle()
    drives = {drive.number for drive in store.drives if in_memory(drive.folder)}
    stored = sum(_on(drives, store, record, config.store.slots) for record in _records(store))
    stored += round(_scratch_nbytes(plan) * len(drives) / len(store.drives))
    found = replace(before.workspace, threads=_threads_nbytes(len(store.drives)))
    plan = replace(plan, footprint=_footprint(plan, config, found, stored))
    require_memory(plan, config, plan_of)
    return plan


def _threads_nbytes(drives: int) -> int:
    return drives * THREADS_PER_DRIVE * THREAD_NBYTES


def _records(store: StoreWriter) -> list[Record]:
    return list(store.records.values())


def _on(drives: set[int], store: StoreWriter, record: Record, slots: int) -> int:
    """Return the bytes of a record's shards on ``drives``, in all slots."""
    geometry = record.geometry
    shards = range(geometry.shard_count if drives else 0)
    places = [store.chunk(record.name, k * geometry.chunks_per_shard).drive for k in shards]
    found = sum(geometry.file_nbytes(k) for k in shards if places[k] in drives)
    return found * (1 if record.shared else slots)


def _scratch_nbytes(plan: Plan) -> int:
    """Return the bytes of gradients that wait on drives."""
    return 0 if plan.step.sizes.gradients_in_ram else plan.step.shape.gradients_nbytes


def _nearest(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _footprint(plan: Plan, config: RunConfig, found: Workspace, stored: int) -> Footprint:
    lock = config.memory.lock
    may = lock_limit()
    if may is not None:
        may = replace(may, nbytes=max(0, may.nbytes - status_nbytes("VmLck")))
    fits = may is None or plan.arenas_nbytes <= may.nbytes
    return Footprint(
        imports=resident_nbytes() + LATER_NBYTES,
        workspace=found,
        stored=stored,
        limit=memory_limit(),
        lock=lock == "required" or (lock == "auto" and fits),
        lock_limit=may,
    )


def _room(plan: Plan) -> int:
    assert plan.footprint is not None  # just made
    return plan.footprint.limit.nbytes - plan.total_nbytes - plan.footprint.stored


# -- refusing ----------------------------------------------------------------------------------


def require_memory(plan: Plan, config: RunConfig, plan_of: PlanOf) -> None:
    """Return if a run fits the memory that this process may have, and may lock.

    Raises:
        CapacityError: It does not; the message has both numbers, where the limit is set, what the
            run needs and what would help.
    """
    footprint = plan.footprint
    assert footprint is not None  # counted by whoever asks

    def need(other: RunConfig) -> int:
        on_top = footprint.imports + footprint.stored
        return plan_of(other).arenas_nbytes + on_top + _scaled(footprint, config, other).nbytes

    wanted = plan.total_nbytes + footprint.stored
    if wanted > footprint.limit.nbytes:
        raise CapacityError(
            f"the run needs {_gib(wanted)} of memory, {footprint.limit.source} allows "
            f"{_gib(footprint.limit.nbytes)}:\n{needs(plan)}\n"
            + _advice(plan, config, need, wanted, footprint.limit)
        )
    if config.memory.lock == "required" and footprint.lock_limit is not None:
        _require_lock(plan, config, plan_of, footprint.lock_limit)


def _require_lock(plan: Plan, config: RunConfig, plan_of: PlanOf, limit: Limit) -> None:
    wanted = plan.arenas_nbytes
    if wanted > limit.nbytes:
        advice = _advice(plan, config, lambda c: plan_of(c).arenas_nbytes, wanted, limit)
        raise CapacityError(
            f"memory.lock is required and the arenas take {_gib(wanted)}, {limit.source} allows "
            f"{_gib(limit.nbytes)}; {RAISE_LOCK}, or set memory.lock to auto:\n{needs(plan)}\n"
            + advice
        )


def _advice(plan: Plan, config: RunConfig, need: knobs.Need, now: int, limit: Limit) -> str:
    values = knobs.ladders(config, plan, now - limit.nbytes)
    return knobs.listed(knobs.advise(config, values, need, now=now, limit=limit.nbytes))


def _scaled(footprint: Footprint, config: RunConfig, other: RunConfig) -> Workspace:
    tokens = _tokens(other) / _tokens(config)
    chunk = other.train.loss_chunk / config.train.loss_chunk
    return footprint.workspace.scaled(tokens=tokens, chunk=chunk)


def _tokens(config: RunConfig) -> int:
    return config.train.micro_batch * config.data.max_seq_len


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _require_device(plan: Plan, device: torch.device) -> None:
    assert plan.footprint is not None  # measured
    workspace_nbytes = plan.footprint.workspace.device
    wanted = plan.device_nbytes + workspace_nbytes
    free, _ = torch.cuda.mem_get_info(device)
    if wanted > free:
        raise CapacityError(
            f"the plan takes {_gib(wanted)} on {device}, {_gib(workspace_nbytes)} of it for the "
            f"computation; {_gib(free)} are free; lower train.micro_batch, train.accumulate or "
            "data.max_seq_len"
        )
