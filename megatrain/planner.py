"""The plan of a run: what fits where, and what a step moves, read off the step's schedule.

The planner interprets the same list of operations that the executor runs, without running it.
So the table that a run prints before it allocates cannot drift from what the run does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatrain.footprint import Footprint
from megatrain.ops import DEVICE_ARENAS, RESIDENT, ArenaName, Kind, Lane, Op, Step, Take
from megatrain.schedule import build
from megatrain.shape import MOMENTS, PIECE, Shape, Sizes
from tiering.errors import CapacityError
from tiering.placement import place
from tiering.records import ALIGNMENT, Record, Tier, round_up

SLABS_PER_STEP = 2048  # about; more operations cost more than their overlap gains
DEFAULT_SLAB = 16 * PIECE  # 1,048,576 elements: large requests, small staging
Arenas = Mapping[ArenaName, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes that a run may use: of RAM, and of CXL memory; ``None`` leaves it to the planner."""

    ram: int
    device_in_ram: bool
    resident: int | None = None
    slab_length: int | None = None
    gradients_in_ram: bool | None = None
    cxl: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one step reads from a tier and writes to it."""

    read: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A step's schedule with the memory it needs and the bytes it moves.

    ``footprint`` is what comes on top of the arenas, once it is known.
    """

    step: Step
    ops: tuple[Op, ...]
    arenas: Arenas
    records: Mapping[str, Record]
    ram: int
    footprint: Footprint | None = None

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the records kept in RAM."""
        return tier_nbytes(self.records, self.step.placement).get(Tier.PINNED, 0)

    @property
    def tiers(self) -> Mapping[Tier, int]:
        """Bytes of records per tier."""
        return tier_nbytes(self.records, self.step.placement)

    @property
    def on_drives(self) -> bool:
        """Whether any record lives on a drive."""
        return any(tier not in RESIDENT for tier in self.step.placement.values())

    @property
    def host_nbytes(self) -> int:
        """Bytes of RAM that the run allocates for records and slabs."""
        return self.resident_nbytes + sum(
            sum(slabs) for name, slabs in self.arenas.items() if self.on_host(name)
        )

    @property
    def cxl_nbytes(self) -> int:
        """Bytes of CXL memory that the run allocates for records."""
        return self.tiers.get(Tier.CXL, 0)

    @property
    def arenas_nbytes(self) -> int:
        """Bytes of host memory that the run allocates, of both kinds."""
        return self.host_nbytes + self.cxl_nbytes

    @property
    def device_nbytes(self) -> int:
        """Bytes that the run allocates on a device with memory of its own."""
        return sum(sum(slabs) for name, slabs in self.arenas.items() if not self.on_host(name))

    @property
    def total_nbytes(self) -> int:
        """Bytes of the whole process at most, as far as they are known."""
        return self.arenas_nbytes + (self.footprint.nbytes if self.footprint else 0)

    def tables(self) -> Mapping[Tier, list[tuple[str, int]]]:
        """Return name and bytes of everything that is taken of each host arena, in order."""
        found = {
            tier: [
                (name, self.records[name].padded_nbytes)
                for name, place in self.step.placement.items()
                if place is tier
            ]
            for tier in (Tier.PINNED, Tier.CXL)
        }
        found[Tier.PINNED] += [
            (slab_name(name, index), nbytes)
            for name, slabs in self.arenas.items()
            for index, nbytes in enumerate(slabs)
            if nbytes and self.on_host(name)
        ]
        return found

    def on_host(self, arena: ArenaName) -> bool:
        """Return whether an arena counts against ``memory.ram``."""
        return self.step.device_in_ram or arena not in DEVICE_ARENAS

    @property
    def traffic(self) -> Mapping[Tier, Traffic]:
        """Bytes per step and tier."""
        return traffic(self.ops)

    @property
    def lanes(self) -> Mapping[Lane, int]:
        """Bytes that each lane moves in a step."""
        moved: dict[Lane, int] = dict.fromkeys(Lane, 0)
        for op in self.ops:
            moved[op.lane] += op.nbytes
        return moved

    def gradient_places(self) -> Mapping[str, Take]:
        """Return where each unit's dense gradient waits in RAM for its update."""
        return {
            op.unit: op.source
            for op in self.ops
            if op.kind is Kind.SUM_SQUARES
            and op.source is not None
            and op.source.arena is ArenaName.GRADIENTS
        }

    def without_commit(self) -> tuple[Op, ...]:
        """Return the operations of a step that is not committed."""
        return build(replace(self.step, commit=False))


def slab_name(arena: ArenaName, index: int) -> str:
    """Return how a slab is called among what is taken of its arena."""
    return f"{arena} {index}"


def traffic(ops: Iterable[Op]) -> Mapping[Tier, Traffic]:
    """Add up the moves of ``ops`` by tier."""
    read: dict[Tier, int] = defaultdict(int)
    written: dict[Tier, int] = defaultdict(int)
    for op in ops:
        for move in op.moves:
            read[move.tier] += move.read
            written[move.tier] += move.written
    return {
        tier: Traffic(read=read[tier], written=written[tier])
        for tier in Tier
        if read[tier] or written[tier]
    }


def arenas_of(ops: Iterable[Op]) -> Arenas:
    """Return, for each arena, the bytes of its slabs: the largest hold taken on each."""
    slabs: dict[ArenaName, dict[int, int]] = defaultdict(dict)
    for op in ops:
        for take in op.takes:
            held = slabs[take.arena]
            held[take.index] = max(held.get(take.index, 0), round_up(take.nbytes, ALIGNMENT))
    return {
        name: tuple(held.get(i, 0) for i in range(max(held) + 1)) for name, held in slabs.items()
    }


def tier_nbytes(records: Mapping[str, Record], placement: Mapping[str, Tier]) -> Mapping[Tier, int]:
    """Return the bytes of the records on each tier."""
    total: dict[Tier, int] = defaultdict(int)
    for name, tier in placement.items():
        total[tier] += records[name].padded_nbytes
    return dict(total)


class DoesNotFitError(CapacityError):
    """Not even the smallest plan fits; ``plan`` is that one, the message has its needs."""

    def __init__(self, plan: Plan, hint: str = "") -> None:
        self.plan = plan
        hint = hint or (
            "raise memory.ram, or lower train.micro_batch, train.accumulate or data.max_seq_len"
        )
        super().__init__(
            f"memory.ram is {plan.ram / 2**20:.1f} MiB, the smallest plan needs "
            f"{plan.host_nbytes / 2**20:.1f} MiB:\n{needs(plan)}\n{hint}"
        )


def fit(shape: Shape, records: Mapping[str, Record], budget: Budget) -> Plan:
    """Return the best plan within the budget.

    Gradients in RAM come before large slabs, since gradients on drives are written; what is
    left holds records, weights before optimizer state.

    Raises:
        DoesNotFitError: Not even the smallest slabs fit.
    """
    for sizes in candidates(shape, budget):
        bare = assemble(shape, records, sizes, budget, resident=0)
        if bare.host_nbytes <= budget.ram:
            return _with_records(bare, budget)
    raise DoesNotFitError(smallest(shape, records, budget))


def smallest(shape: Shape, records: Mapping[str, Record], budget: Budget) -> Plan:
    """Return the plan that needs the least, whether it fits or not."""
    last = {sizes.gradients_in_ram: sizes for sizes in candidates(shape, budget)}
    bare = [assemble(shape, records, sizes, budget, resident=0) for sizes in last.values()]
    return min(bare, key=lambda plan: plan.host_nbytes)


def _with_records(bare: Plan, budget: Budget) -> Plan:
    """Fill the room with records. When all of them fit, no slab is needed to stage them."""
    shape, sizes, records = bare.step.shape, bare.step.sizes, bare.records
    cap = budget.ram if budget.resident is None else budget.resident
    everything = sum(record.padded_nbytes for record in records.values())
    if everything <= cap + budget.cxl:
        whole = assemble(shape, records, sizes, budget, resident=everything)
        slabs = whole.host_nbytes - whole.resident_nbytes
        room = min(cap, budget.ram - slabs)
        if room < everything:  # then some of it goes to cxl
            whole = assemble(shape, records, sizes, budget, resident=room)
        if whole.host_nbytes <= budget.ram and not whole.on_drives:
            return whole
    room = min(cap, budget.ram - bare.host_nbytes)
    return assemble(shape, records, sizes, budget, resident=room)


def candidates(shape: Shape, budget: Budget) -> Iterator[Sizes]:
    """Yield the sizes to try, best first."""
    lengths = (budget.slab_length,) if budget.slab_length else slab_lengths(shape)
    fits = shape.gradients_nbytes < budget.ram
    keeps = (True,) * fits + (False,)
    if budget.gradients_in_ram is not None:
        keeps = (budget.gradients_in_ram,)
    for keep in keeps:
        for length in lengths:
            for depth in (4, 3, 2):
                yield Sizes(
                    slab_length=length,
                    staging_slabs=staging_slabs(shape, length, depth),
                    grad_slabs=depth,
                    update_slabs=depth,
                    gradients_in_ram=keep,
                )


def slab_lengths(shape: Shape) -> tuple[int, ...]:
    """Return the slab lengths to try, longest first; the longest grows with the model."""
    widest = round_up(max(unit.length for unit in shape.units), PIECE)
    longest = max(min(DEFAULT_SLAB, widest), shape.parameters // SLABS_PER_STEP)
    doublings = (longest // PIECE).bit_length() - 1
    return tuple(PIECE << k for k in range(doublings, max(0, doublings - 4) - 1, -1))


def staging_slabs(shape: Shape, slab_length: int, depth: int) -> int:
    """Return the slabs that hold one layer read ahead, within reason."""
    layer = max((unit.length for unit in shape.layers), default=slab_length)
    return max(2, min(depth * 4, -(-layer // slab_length) + 1))


def assemble(
    shape: Shape, records: Mapping[str, Record], sizes: Sizes, budget: Budget, *, resident: int
) -> Plan:
    """Return the plan for given sizes and ``resident`` bytes of records in RAM."""
    order = placement_order(shape, records)
    weights = {f"{unit.name}.{shape.streamed}" for unit in shape.units}
    placement = place(
        order,
        {Tier.PINNED: resident, Tier.CXL: budget.cxl},
        tolerant=weights if shape.streamed not in shape.updated_roles else set(),
    )
    step = Step(
        shape=shape,
        sizes=sizes,
        placement=placement,
        homes={record.name: record.tier for record in order},
        device_in_ram=budget.device_in_ram,
    )
    ops = build(step)
    return Plan(
        step=step,
        ops=ops,
        arenas=arenas_of(ops),
        records={record.name: record for record in order},
        ram=budget.ram,
    )


def placement_order(shape: Shape, records: Mapping[str, Record]) -> Sequence[Record]:
    """Return the records in the order in which they earn RAM.

    What is streamed is read twice a step and comes first; then the optimizer's records, unit by
    unit. A bf16 copy that this run does not stream is only written, and comes last.
    """
    names = [f"{unit.name}.{shape.streamed}" for unit in shape.units]
    optimizer = [role for role in ("master", *MOMENTS) if role != shape.streamed]
    names += [f"{unit.name}.{role}" for unit in shape.units for role in optimizer]
    rest = [role for role in shape.roles if role != shape.streamed and role not in optimizer]
    names += [f"{unit.name}.{role}" for role in rest for unit in shape.units]
    return [records[name] for name in names]


def needs(plan: Plan) -> str:
    """Return the table of what ``plan`` needs of host memory, the largest first."""
    rows = [(sum(slabs), str(name)) for name, slabs in plan.arenas.items() if plan.on_host(name)]
    rows += [(plan.resident_nbytes, str(ArenaName.RECORDS)), (plan.cxl_nbytes, "records in cxl")]
    if found := plan.footprint:
        rows += [
            (found.imports, "imports"),
            (found.workspace.nbytes, "workspace"),
            (found.stored, "store on drives that are memory"),
        ]
    return "\n".join(
        f"  {name:<32}{nbytes / 2**20:>10.1f} MiB"
        for nbytes, name in sorted(rows, reverse=True)
        if nbytes
    )
