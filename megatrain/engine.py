"""Everything that a run allocates and starts, put together from a store and a run file."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.checked import CheckedReader
from checkpoint.schema import Layout, Schema, Tensor, Unit
from megatrain import knobs
from megatrain.allocator import HeapKeeper
from megatrain.config import MemoryConfig, RunConfig
from megatrain.executor import Applied, Executor
from megatrain.footprint import RAISE_LOCK
from megatrain.lanes import make_lanes
from megatrain.memory import Memory
from megatrain.model.streamed import StreamedModel
from megatrain.ops import Kind, Op
from megatrain.optimizer import CpuAdam
from megatrain.planner import Budget, DoesNotFitError, Plan, fit, smallest
from megatrain.shape import PIECE, Shape, UnitShape
from megatrain.side_files import as_folder
from megatrain.stage import TORCH_DTYPES, Stage, held
from megatrain.teardown import Teardown
from megatrain.update import Update
from megatrain.watchdog import Watch
from tiering.arena import Arena
from tiering.backends import cxl
from tiering.errors import CapacityError, RefusedError
from tiering.pool import Pool
from tiering.records import CHUNK_LENGTH, ITEMSIZE, Record, Tier
from tiering.scratch import Scratch
from tiering.store import StoreWriter, open_reader

MOST_READERS = 4  # more than four drives are busy with what an update reads and writes at once


def pick_device(name: str) -> torch.device:
    """Return the device that a run file asks for; ``auto`` takes a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise RefusedError("train.device is cuda, but torch sees no CUDA device; use auto or cpu")
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def trained_units(schema: Schema) -> tuple[Unit, ...]:
    """Return the units that are streamed, in the order in which they run."""
    return tuple(unit for unit in schema.units if unit.trainable)


def streamed_role(schema: Schema, dtype: str) -> str:
    """Return the role that crosses to the device when computing in ``dtype``."""
    if dtype == "float32":
        return "master"
    if schema.layout is Layout.FLOAT32:
        raise RefusedError(
            "train.dtype is bfloat16, but this store was converted without bfloat16 weights; "
            "convert the model again with --dtype bfloat16, or set train.dtype to float32"
        )
    return "weights"


def shape_of(schema: Schema, config: RunConfig) -> Shape:
    """Return the sizes that a step's schedule depends on."""
    units = trained_units(schema)
    first, roles = units[0], schema.roles(units[0])
    table = first.tensors[0]
    words, hidden = table.shape
    train = config.train
    tokens = train.samples_per_step * config.data.max_seq_len
    return Shape(
        units=tuple(UnitShape(name=unit.name, length=unit.length) for unit in units),
        table_length=first.tensors[1].offset if len(first.tensors) > 1 else first.length,
        tied=any(tie.target == table.name for tie in schema.ties),
        hidden=hidden,
        tokens=tokens,
        micro_batches=train.accumulate,
        rows=min(words, tokens),
        loss_chunk=train.loss_chunk,
        streamed=streamed_role(schema, train.dtype),
        itemsizes={str(r): ITEMSIZE[schema.record(first, r).dtype] for r in roles},
        compute_itemsize=TORCH_DTYPES[train.dtype].itemsize,
    )


def make_plan(
    schema: Schema, records: Mapping[str, Record], config: RunConfig, device: torch.device
) -> Plan:
    """Return the plan of a run on a store that has ``records``, as far as its arenas go.

    Raises:
        CapacityError: It does not fit into ``memory.ram``.
        RefusedError: It asks for CXL memory, and there is none.
    """
    if config.memory.cxl:
        cxl_nodes(config.memory)
    try:
        return _fitted(schema, records, config, device)
    except DoesNotFitError as refusal:
        hint = _hint(schema, records, config, device, refusal.plan)
        raise DoesNotFitError(refusal.plan, hint) from None


def planning(
    schema: Schema, records: Mapping[str, Record], device: torch.device
) -> Callable[[RunConfig], Plan]:
    """Return what plans a run on a store with any settings."""
    return lambda config: _fitted(schema, records, config, device)


def _fitted(
    schema: Schema, records: Mapping[str, Record], config: RunConfig, device: torch.device
) -> Plan:
    shape = shape_of(schema, config)
    return fit(shape, records, _budget(config, shape, device))


def _budget(config: RunConfig, shape: Shape, device: torch.device) -> Budget:
    memory = config.memory
    slab = memory.slab
    length = None if slab == "auto" else max(PIECE, slab // shape.compute_itemsize // PIECE * PIECE)
    return Budget(
        ram=memory.ram,
        device_in_ram=device.type == "cpu",
        resident=None if memory.resident == "auto" else memory.resident,
        slab_length=length,
        gradients_in_ram={"auto": None, "ram": True, "disk": False}[memory.gradients],
        cxl=memory.cxl,
    )


def _hint(
    schema: Schema,
    records: Mapping[str, Record],
    config: RunConfig,
    device: torch.device,
    least: Plan,
) -> str:
    """Say how a run fits whose smallest plan is too large for ``memory.ram``."""

    def need(other: RunConfig) -> int:
        shape = shape_of(schema, other)
        return smallest(shape, records, _budget(other, shape, device)).host_nbytes

    now, limit = least.host_nbytes, config.memory.ram
    values = knobs.ladders(config, least, now - limit)
    found = knobs.advise(config, values, need, now=now, limit=limit)
    return f"raise memory.ram to {-(-now >> 20)}MiB; to stay within it, {knobs.listed(found)}"


@dataclass(slots=True, kw_only=True)
class Engine:
    """The running parts of one run."""

    stage: Stage
    executor: Executor
    update: Update


@contextmanager
def start(
    store: StoreWriter,
    schema: Schema,
    plan: Plan,
    config: RunConfig,
    *,
    device: torch.device,
    counts: dict[str, int],
    commit: Callable[[Applied], None],
    leave: Callable[[BaseException], None],
) -> Iterator[Engine]:
    """Allocate what the plan says, load the resident records, and give it all back at the end.

    ``leave`` is called when the run has failed and cannot end, because a lane is stuck.
    """
    train = config.train
    with Teardown() as stack:
        arenas = _arenas(plan, config, stack)
        host = arenas[Tier.PINNED]
        stack.callback(gc.collect)  # tensors that alias the arena must be gone before it closes
        always = config.store.verify_reads == "always"
        pool = Pool(store, plan.step.placement, arenas, verify_reads=always)
        stack.callback(pool.close)
        pool.load()
        memory = Memory(plan.arenas, host=host, device=device)
        stack.callback(memory.close)
        _check_gathered(plan, pool, memory)
        stack.callback(gc.collect)
        model = _model(store, schema, config, device)
        stack.callback(model.release)
        stage = Stage(
            plan=plan,
            memory=memory,
            pool=pool,
            scratch=_scratch(store, plan, stack),
            model=model,
            units={unit.name: unit for unit in trained_units(schema)},
            device=device,
            dtype=TORCH_DTYPES[train.dtype],
            heap=HeapKeeper(_heap_limit(plan)),
        )
        adam = stack.enter_context(CpuAdam(betas=train.betas, eps=train.eps))
        update = Update(stage, adam, counts)
        watch = _watch(store, config, leave)
        lanes = make_lanes(device, watch, readers=_readers(store, plan))
        stack.callback(lanes.close)
        executor = Executor(stage, update, lanes, max_norm=train.max_grad_norm, commit=commit)
        yield Engine(stage=stage, executor=executor, update=update)
        del executor, update, stage, model, memory, pool


def _readers(store: StoreWriter, plan: Plan) -> int:
    """Return how many reads may be under way at once: one a drive, as far as chunks stay whole.

    The first pass over what was committed checks each chunk as it comes, and knows no pieces out
    of order.
    """
    length, units = plan.step.sizes.slab_length, plan.step.shape.units
    whole = length % CHUNK_LENGTH == 0 or length >= max(unit.length for unit in units)
    return min(len(store.drives), MOST_READERS) if whole else 1


def _watch(store: StoreWriter, config: RunConfig, leave: Callable[[BaseException], None]) -> Watch:
    def files(thread: int, op: Op) -> Sequence[Path]:
        return (store.path,) if op.kind is Kind.COMMIT else store.waits.of(thread)

    return Watch(stall_warning_s=config.train.stall_warning, files=files, leave=leave)


def _arenas(plan: Plan, config: RunConfig, stack: ExitStack) -> Mapping[Tier, Arena]:
    """Allocate what the plan says, and nothing else of that size afterwards."""
    memory = config.memory
    lock = plan.footprint is None or plan.footprint.lock
    found = {Tier.PINNED: stack.enter_context(Arena(plan.host_nbytes, lock))}
    if plan.cxl_nbytes:
        nodes = cxl_nodes(memory)
        found[Tier.CXL] = stack.enter_context(Arena(plan.cxl_nbytes, lock, nodes=nodes))
    if memory.lock == "required" and not all(arena.locked for arena in found.values()):
        raise CapacityError(f"memory.lock is required, but memory was not locked; {RAISE_LOCK}")
    return found


def _heap_limit(plan: Plan) -> int | None:
    found = plan.footprint
    return None if found is None else plan.total_nbytes - found.workspace.spare


def cxl_nodes(memory: MemoryConfig) -> tuple[int, ...]:
    """Return the NUMA nodes that hold CXL memory.

    Raises:
        RefusedError: There are none, or not those that were named.
    """
    named = () if memory.cxl_nodes == "auto" else memory.cxl_nodes
    return tuple(node.number for node in cxl.choose_nodes(named))


def _check_gathered(plan: Plan, pool: Pool, memory: Memory) -> None:
    """Check the record whose rows are gathered: no later read brings its chunks whole."""
    name = f"{plan.step.shape.outer_in.name}.{plan.step.shape.streamed}"
    if pool.resident(name) is None:
        bounce = next(op.target for op in plan.ops if op.kind is Kind.READ_ROWS)
        pool.check(name, memory.bytes(held(bounce)))


def _scratch(store: StoreWriter, plan: Plan, stack: ExitStack) -> Scratch | None:
    if plan.step.sizes.gradients_in_ram:
        return None
    shape = plan.step.shape
    dense = {unit.name: shape.dense_grad_length(unit.name) for unit in shape.units}
    sizes = {name: length * shape.grad_itemsize for name, length in dense.items() if length}
    return stack.enter_context(Scratch(store, sizes))


def _model(
    store: StoreWriter, schema: Schema, config: RunConfig, device: torch.device
) -> StreamedModel:
    with as_folder({name: store.schema_file(name) for name in schema.files}) as folder:
        return StreamedModel(
            folder,
            trained_units(schema),
            dtype=TORCH_DTYPES[config.train.dtype],
            device=device,
            loss_chunk=config.train.loss_chunk,
            any_family=config.train.any_family,
            buffers=carried_tensors(store.path, schema),
        )


def carried_tensors(path: Path, schema: Schema) -> Mapping[str, torch.Tensor]:
    """Return the untrained tensors of a store, every chunk checked."""
    found: dict[str, torch.Tensor] = {}
    carried = [unit for unit in schema.units if not unit.trainable]
    if not carried:
        return found
    with open_reader(path) as reader:
        checked = CheckedReader(reader)
        for unit in carried:
            record = schema.record(unit, "weights")
            data = bytearray().join(checked.read(record, 0, record.nbytes))
            flat = torch.frombuffer(data, dtype=getattr(torch, record.dtype))
            found |= {tensor.name: _cut(flat, tensor) for tensor in unit.tensors}
    return found


def _cut(flat: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    return flat[tensor.offset : tensor.end].view(tensor.shape)
