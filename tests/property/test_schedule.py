"""The list of operations itself: safe for any timing of the lanes, and it moves what it must."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.ops import ArenaName, Kind, Lane, Op, Step, Take
from megatrain.planner import arenas_of, traffic
from megatrain.schedule import build
from megatrain.shape import PIECE, Shape, Sizes, UnitShape
from tiering.records import Tier

FP32 = {"weights": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}
FLOAT32 = {"master": 4, "exp_avg": 4, "exp_avg_sq": 4}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    length = st.integers(1, 5 * PIECE // 64).map(lambda n: 64 * n)
    table = draw(length)
    rest = draw(st.sampled_from([0, 64, PIECE]))
    layers = draw(st.lists(length, min_size=1, max_size=4))
    units = [UnitShape(name="outer_in", length=table + rest)]
    units += [UnitShape(name=f"layer.{i:03d}", length=n) for i, n in enumerate(layers)]
    units += [UnitShape(name="outer_out", length=draw(length))]
    bf16 = draw(st.booleans())
    tokens = draw(st.integers(1, 512))
    return Shape(
        units=tuple(units),
        table_length=table,
        tied=draw(st.booleans()),
        hidden=64,
        tokens=tokens,
        micro_batches=draw(st.integers(1, 3)),
        rows=min(tokens, table // 64),
        loss_chunk=128,
        streamed="weights" if bf16 else "master",
        itemsizes=FP32 if bf16 or draw(st.booleans()) else FLOAT32,
        compute_itemsize=2 if bf16 else 4,
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    shape = draw(shapes())
    count = st.integers(2, 4)
    sizes = Sizes(
        slab_length=PIECE * draw(st.integers(1, 3)),
        staging_slabs=draw(count),
        grad_slabs=draw(count),
        update_slabs=draw(count),
        gradients_in_ram=draw(st.booleans()),
    )
    names = [f"{unit.name}.{role}" for unit in shape.units for role in shape.roles]
    tiers = draw(
        st.lists(
            st.sampled_from([Tier.PINNED, Tier.NVME]), min_size=len(names), max_size=len(names)
        )
    )
    placement = dict(zip(names, tiers, strict=True))
    return Step(
        shape=shape,
        sizes=sizes,
        placement=placement,
        homes={name: draw(st.sampled_from([Tier.NVME, Tier.ZARR])) for name in names},
        device_in_ram=draw(st.booleans()),
        commit=draw(st.booleans()),
    )


def before(ops: Sequence[Op]) -> list[int]:
    """Return, as bit sets, which operations are certain to be over when each one starts.

    Several reads may be under way at once: the other lanes end one operation before the next.
    """
    over: list[int] = []
    last: dict[Lane, int] = {}
    for op in ops:
        bits = 0
        in_line = op.lane in last and op.lane is not Lane.IO_READ
        for earlier in (*op.deps, *([last[op.lane]] if in_line else [])):
            bits |= over[earlier] | 1 << earlier
        over.append(bits)
        last[op.lane] = op.id
    return over


def uses(op: Op) -> set[Take]:
    return {take for take in (*op.takes, *op.frees, op.source, op.target) if take is not None}


@settings(max_examples=60, deadline=None)
@given(steps())
def test_dependencies_name_earlier_operations(step: Step) -> None:
    ops = build(step)
    assert [op.id for op in ops] == list(range(len(ops)))
    assert all(dep < op.id for op in ops for dep in op.deps)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_no_slab_has_two_holders_whatever_the_timing(step: Step) -> None:
    ops = build(step)
    over = before(ops)
    holders: dict[tuple[ArenaName, int], list[list[Op]]] = defaultdict(list)
    for op in ops:
        taken = {(t.arena, t.index) for t in op.takes}
        for key in {(t.arena, t.index) for t in uses(op)}:
            if key in taken:
                holders[key].append([])
            assert holders[key], f"{op} works on {key} before it is taken"
            holders[key][-1].append(op)
    for holds in holders.values():
        for earlier, later in itertools.pairwise(holds):
            start = over[later[0].id]
            assert all(start >> op.id & 1 for op in earlier), (earlier, later[0])


@settings(max_examples=60, deadline=None)
@given(steps())
def test_whoever_works_on_a_slab_comes_after_its_taker_and_before_its_freer(step: Step) -> None:
    ops = build(step)
    over = before(ops)
    taker: dict[tuple[ArenaName, int], Op] = {}
    users: dict[tuple[ArenaName, int], list[Op]] = defaultdict(list)
    for op in ops:
        for take in op.takes:
            taker[take.arena, take.index] = op
            users[take.arena, take.index] = []
        for take in uses(op):
            key = (take.arena, take.index)
            first = taker[key]
            assert op is first or over[op.id] >> first.id & 1, (op, first)
            users[key].append(op)
        for take in op.frees:
            others = [user for user in users[take.arena, take.index] if user is not op]
            assert all(over[op.id] >> user.id & 1 for user in others), (op, others)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_everything_taken_is_freed_once(step: Step) -> None:
    held: set[tuple[ArenaName, int]] = set()
    for op in build(step):
        for take in op.takes:
            assert (take.arena, take.index) not in held
            held.add((take.arena, take.index))
        for take in op.frees:
            held.remove((take.arena, take.index))
    assert not held


@settings(max_examples=60, deadline=None)
@given(steps())
def test_every_element_is_updated_once_after_the_norm(step: Step) -> None:
    ops = build(step)
    over = before(ops)
    norm = next(op.id for op in ops if op.kind is Kind.NORM)
    covered: dict[str, int] = defaultdict(int)
    for op in ops:
        if op.kind is Kind.UPDATE:
            assert over[op.id] >> norm & 1
            assert op.start == covered[op.unit], "spans in order: checksums depend on it"
            covered[op.unit] = op.stop
    assert covered == {unit.name: unit.length for unit in step.shape.units}


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_commit_comes_after_every_write(step: Step) -> None:
    ops = build(step)
    commits = [op for op in ops if op.kind is Kind.COMMIT]
    assert len(commits) == step.commit
    over = before(ops)
    for commit in commits:
        writes = [op for op in ops if op.kind in (Kind.WRITE_STATE, Kind.FLUSH, Kind.UPDATE)]
        assert all(over[commit.id] >> op.id & 1 for op in writes)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_state_on_drives_moves_as_often_as_the_design_says(step: Step) -> None:
    shape = step.shape
    on_drives = {name for name, tier in step.placement.items() if tier is Tier.NVME}
    moved = traffic(op for op in build(step) if op.kind is not Kind.FLUSH).get(Tier.NVME)
    written = sum(
        unit.length * shape.itemsize(role)
        for unit in shape.units
        for role in shape.roles
        if f"{unit.name}.{role}" in on_drives
    )
    gradients = 0 if step.sizes.gradients_in_ram else shape.gradients_nbytes
    slack = 4096 * len(build(step))
    if moved is None:
        assert written + gradients == 0
        return
    assert written + gradients <= moved.written <= written + gradients + slack


@given(steps())
@settings(max_examples=30, deadline=None)
def test_the_arenas_are_the_largest_holds(step: Step) -> None:
    arenas = arenas_of(build(step))
    streamed = [unit.length for unit in step.shape.layers if not step.in_place(unit.name)]
    if streamed:
        assert len(arenas[ArenaName.BUFFERS]) <= step.sizes.buffers
        assert max(arenas[ArenaName.BUFFERS]) >= max(streamed) * step.shape.compute_itemsize
    else:
        assert ArenaName.BUFFERS not in arenas
    assert len(arenas.get(ArenaName.STAGING, ())) <= step.sizes.staging_slabs
