"""How much memory a step's computation takes beside the planned arenas: measured, not guessed.

Before anything of the run is allocated, steps are made of a model that has a few layers of each
kind, zeros for weights, and micro-batches of the largest size. They go through the executor of the
run's own steps, but nothing is read or written. What the process has resident at most, without
their arenas and without what stays afterwards, is the workspace.
"""

from __future__ import annotations

import gc
import resource
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from checkpoint.schema import Schema, Unit
from megatrain import allocator
from megatrain.config import RunConfig
from megatrain.data.batches import MicroBatch, Window
from megatrain.data.jsonl import IGNORED
from megatrain.executor import Applied, Executor
from megatrain.footprint import Workspace
from megatrain.lanes import make_lanes
from megatrain.memory import Memory
from megatrain.model.metered import MeteredModel
from megatrain.optimizer import AdamStep, CpuAdam
from megatrain.planner import Plan, arenas_of
from megatrain.schedule import build
from megatrain.shape import Shape
from megatrain.side_files import as_folder
from megatrain.stage import TORCH_DTYPES, Stage
from megatrain.update import Update
from tiering.arena import Arena
from tiering.backends import zarr3
from tiering.errors import CapacityError
from tiering.process import PeakMeter, resident_nbytes, status_nbytes
from tiering.recordio import Transfer
from tiering.records import Tier

STEPS = 2  # the second finds what the first has left behind; from there the peak stays the same
LAYERS = 3  # of each kind; some more find a little less room in the holes that others leave
MICRO_BATCHES = 2  # enough for gradients to be added up
TOKEN_NBYTES = 3 * 8  # ids, mask and targets of a token
CHUNK_NBYTES = 160  # what pool and manifest keep of a chunk
_UNTOUCHED = 256 << 20  # private memory that threads and heaps reserve beside what they touch


def measure(
    plan: Plan,
    schema: Schema,
    files: Mapping[str, bytes],
    config: RunConfig,
    device: torch.device,
    *,
    room: int,
) -> Workspace:
    """Return what a step of ``plan`` takes on the host beside its arenas.

    ``files`` are the model's configuration, name to content. ``room`` is the most that it may
    take. On return the libraries that a run needs are loaded, and all else is given back.

    Raises:
        CapacityError: The computation did not end within ``room``.
    """
    allocator.keep_to_plan()
    with as_folder(files) as folder, PeakMeter() as meter:
        model = _model(folder, schema, config, device, meter)
        small = small_plan(plan, model.picked)
        other_list = plan.without_commit()  # the run's executor has it beside the plan's own
        with _at_most(small.host_nbytes + room):
            device_nbytes = _steps(small, model, _units(schema), config)
        peaks, call_nbytes = dict(model.peaks), model.call_nbytes
        del model, other_list
    settle()
    stays = resident_nbytes() + small.host_nbytes
    found = Workspace(**{part: max(0, peak - stays) for part, peak in peaks.items()})
    return _completed(replace(found, device=device_nbytes), plan, small, call_nbytes)


def settle() -> None:
    """Give back what nobody uses any more, so that what is resident is in use."""
    gc.collect()
    allocator.trim()


def _units(schema: Schema) -> tuple[Unit, ...]:
    return tuple(unit for unit in schema.units if unit.trainable)


def _model(
    folder: Path, schema: Schema, config: RunConfig, device: torch.device, meter: PeakMeter
) -> MeteredModel:
    model = MeteredModel(
        folder,
        _units(schema),
        dtype=TORCH_DTYPES[config.train.dtype],
        device=device,
        loss_chunk=config.train.loss_chunk,
        any_family=config.train.any_family,
        buffers=_zeros(schema),
        meter=meter,
    )
    model.picked = sample(_units(schema)[1:-1], model.layer_types)
    return model


def _zeros(schema: Schema) -> Mapping[str, torch.Tensor]:
    """Return stand-ins for the untrained tensors of a store."""
    return {
        tensor.name: torch.zeros(tensor.shape, dtype=getattr(torch, record.dtype))
        for unit in schema.units
        if not unit.trainable
        for record in [schema.record(unit, "weights")]
        for tensor in unit.tensors
    }


def sample(layers: Sequence[Unit], types: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of the first few layers of each kind: shapes of tensors, and type."""
    found: dict[object, list[int]] = defaultdict(list)
    for index, unit in enumerate(layers):
        shapes = tuple(tensor.shape for tensor in unit.tensors)
        found[shapes, types[index] if types else ""].append(index)
    return tuple(sorted(index for alike in found.values() for index in alike[:LAYERS]))


def small_plan(plan: Plan, layers: Sequence[int]) -> Plan:
    """Return the plan of a step with only some layers, few micro-batches and the fewest slabs.

    Each of its arenas is at most as large as what ``plan`` has for the same bytes.
    """
    shape = plan.step.shape
    micro_batches = min(shape.micro_batches, MICRO_BATCHES)
    tokens = shape.tokens // shape.micro_batches * micro_batches
    shape = replace(
        shape,
        units=(shape.outer_in, *(shape.layers[i] for i in layers), shape.outer_out),
        tokens=tokens,
        micro_batches=micro_batches,
        rows=min(shape.rows, tokens),
    )
    sizes = replace(
        plan.step.sizes,
        staging_slabs=2,
        grad_slabs=2,
        update_slabs=2,
        gradients_in_ram=False,
        buffers=1,
        accumulators=1,
    )
    placement = {f"{unit.name}.{role}": Tier.NVME for unit in shape.units for role in shape.roles}
    step = replace(plan.step, shape=shape, sizes=sizes, placement=placement, commit=False)
    ops = build(step)
    return replace(plan, step=step, ops=ops, arenas=arenas_of(ops))


class _Blank:
    """Takes the place of pool and scratch: zeros are read, and what is written is dropped."""

    def resident(self, name: str) -> memoryview | None:
        return None

    def begin_step(self) -> None:
        pass

    def read(self, name: str, offset: int, out: memoryview) -> None:
        pass

    def read_all(self, transfers: Sequence[Transfer]) -> None:
        pass

    def gather(self, name: str, offset: int, out: memoryview) -> None:
        pass

    def write(self, name: str, offset: int, data: memoryview) -> None:
        pass

    def write_all(self, transfers: Sequence[Transfer]) -> None:
        pass

    def applied(self, checksums: object) -> None:
        pass


def _steps(plan: Plan, model: MeteredModel, units: Sequence[Unit], config: RunConfig) -> int:
    """Make the steps; return what they took on the device, where that is another memory."""
    train, device = config.train, model.device
    with ExitStack() as stack:
        adam = stack.enter_context(CpuAdam(betas=train.betas, eps=train.eps))
        host = stack.enter_context(Arena(plan.host_nbytes, lock=False))
        stack.callback(gc.collect)  # tensors that alias the arena must be gone before it closes
        memory = Memory(plan.arenas, host=host, device=device)
        stack.callback(memory.close)
        stack.callback(model.release)
        blank: Any = _Blank()
        stage = Stage(
            plan=plan,
            memory=memory,
            pool=blank,
            scratch=blank,
            model=model,
            units={unit.name: unit for unit in units},
            device=device,
            dtype=model.dtype,
        )
        settle()
        model.meter.lap()
        lanes = make_lanes(device)
        stack.callback(lanes.close)
        executor = Executor(
            stage, Update(stage, adam, {}), lanes, max_norm=train.max_grad_norm, commit=_no_commit
        )
        window = largest_window(plan.step.shape, config)
        with _device_peak(device) as device_peak, model.noted("rest"):
            for _ in range(STEPS):
                executor.step(window, _no_update, number=1, seed=0, commit=False)
        del executor, stage, memory
    return device_peak.nbytes


def _no_commit(applied: Applied) -> None:
    raise RuntimeError("a step that is only measured was to be committed")


def _no_update(name: str, t: int) -> AdamStep:
    return AdamStep(lr=0.0, eps=1.0, weight_decay=0.0)


def largest_window(shape: Shape, config: RunConfig) -> Window:
    """Return a window of the most tokens, as different and as unequally long as they may be."""
    size = (config.train.micro_batch, config.data.max_seq_len)
    batches = []
    for number in range(shape.micro_batches):
        ids = torch.arange(size[0] * size[1]).add_(number * size[0] * size[1]) % shape.rows
        mask = torch.ones(size, dtype=torch.int64)
        mask[-1, -1] = 0
        targets = torch.zeros(size, dtype=torch.int64)
        targets[:, -1] = IGNORED
        batches.append(
            MicroBatch(
                input_ids=ids.view(size),
                attention_mask=mask if size[0] > 1 else None,
                targets=targets,
            )
        )
    return Window(
        micro_batches=batches,
        indices=(),
        epoch=0,
        cursor=0,
        targets=shape.micro_batches * size[0] * (size[1] - 1),
        samples=shape.micro_batches * size[0],
        tokens=shape.tokens,
        truncated=0,
        unlabelled=0,
    )


def _completed(found: Workspace, plan: Plan, small: Plan, call_nbytes: int) -> Workspace:
    """Add what the run has more of than the steps that were measured."""
    full, part = plan.step.shape, small.step.shape
    batches = full.micro_batches - part.micro_batches
    # the rows' gradient, and what is cut out of a tied head's for them, as float32
    rows = (full.rows - part.rows) * full.hidden * 4
    chunks = sum(record.geometry.chunk_count for record in plan.records.values())
    kept = batches * call_nbytes + (full.tokens - part.tokens) * TOKEN_NBYTES
    kept += chunks * CHUNK_NBYTES + _codec_nbytes(plan)
    return replace(found, outer=found.outer + rows, rest=found.rest + rows, kept=kept)


def _codec_nbytes(plan: Plan) -> int:
    """Return the bytes of chunks on their way into and out of encoded shards.

    Each thread has a decoded and an encoded one, and each role a shard that is being written.
    """
    encoded = [record for record in plan.records.values() if record.codec is not None]
    chunk = max((record.geometry.chunk_nbytes for record in encoded), default=0)
    return chunk * (2 * zarr3.THREADS + len(plan.step.shape.roles))


@dataclass(slots=True)
class _DevicePeak:
    nbytes: int = 0


@contextmanager
def _device_peak(device: torch.device) -> Iterator[_DevicePeak]:
    """Measure what is allocated meanwhile on a GPU; a CPU's memory is the host's."""
    peak = _DevicePeak()
    if device.type != "cuda":
        yield peak
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield peak
    peak.nbytes = torch.cuda.max_memory_allocated(device) - before


@contextmanager
def _at_most(nbytes: int) -> Iterator[None]:
    """Let no more than about ``nbytes`` of private memory be added meanwhile.

    Too large a computation then ends in an error here, where it would have been killed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    ceiling = status_nbytes("VmData") + nbytes + _UNTOUCHED
    if soft != resource.RLIM_INFINITY:
        ceiling = min(ceiling, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling, hard))
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for it
        raise CapacityError(
            f"the computation of one micro-batch did not end within the {nbytes / 2**30:.2f} GiB "
            f"that are left for it and its buffers: {error}"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
