from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.ops import ArenaName, Kind
from megatrain.planner import Budget, Plan, fit
from megatrain.shape import Shape, UnitShape
from tiering.errors import CapacityError
from tiering.records import Record, Tier

MIB = 1 << 20


def model(layers: int = 8, length: int = MIB) -> tuple[Shape, dict[str, Record]]:
    units = [UnitShape(name="outer_in", length=4 * MIB)]
    units += [UnitShape(name=f"layer.{i:03d}", length=length) for i in range(layers)]
    units += [UnitShape(name="outer_out", length=64)]
    shape = Shape(
        units=tuple(units),
        table_length=4 * MIB,
        tied=True,
        hidden=512,
        tokens=256,
        micro_batches=1,
        rows=256,
        loss_chunk=128,
        streamed="weights",
        itemsizes={"weights": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4},
        compute_itemsize=2,
    )
    records = {
        f"{u.name}.{role}": Record(
            name=f"{u.name}.{role}",
            dtype="bfloat16" if role == "weights" else "float32",
            length=u.length,
        )
        for u in units
        for role in shape.roles
    }
    return shape, records


@pytest.mark.parametrize(
    ("tokens", "micro_batches", "itemsize"), [(64, 1, 2), (64, 4, 4), (256, 1, 4)]
)
def test_the_head_accumulates_in_float32_as_soon_as_anything_is_added_up(
    tokens, micro_batches, itemsize
):
    shape = replace(model()[0], tokens=tokens, micro_batches=micro_batches, loss_chunk=128)
    assert shape.head_accumulator_itemsize == itemsize


def plan(ram: int, **limits: int | bool | None) -> Plan:
    return fit(*model(), Budget(ram=ram, device_in_ram=True, **limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("ram", [48 * MIB, 80 * MIB, 120 * MIB, 1024 * MIB])
def test_a_plan_stays_within_its_budget(ram):
    assert plan(ram).host_nbytes <= ram


def test_room_is_used_for_gradients_first_then_weights_then_optimizer_state():
    small, middle, large = plan(48 * MIB), plan(100 * MIB), plan(1024 * MIB)
    assert not small.step.sizes.gradients_in_ram
    assert middle.step.sizes.gradients_in_ram
    assert middle.step.placement["layer.000.weights"] is Tier.PINNED
    assert middle.step.placement["layer.007.exp_avg_sq"] is Tier.NVME
    assert set(large.step.placement.values()) == {Tier.PINNED}


def test_state_on_drives_is_read_16_and_written_14_bytes_a_parameter():
    found = plan(1024 * MIB, resident=0)
    parameters = found.step.shape.parameters
    moved = found.traffic[Tier.NVME]
    assert moved.written == pytest.approx(14 * parameters, rel=0.01)
    assert moved.read <= 16.01 * parameters


def test_gradients_on_drives_cost_two_bytes_each_way():
    keep = plan(1024 * MIB, resident=0, gradients_in_ram=True)
    spill = plan(1024 * MIB, resident=0, gradients_in_ram=False)
    gradients = spill.step.shape.gradients_nbytes
    before, after = keep.traffic[Tier.NVME], spill.traffic[Tier.NVME]
    assert after.written - before.written == pytest.approx(gradients, rel=0.01)
    assert after.read - before.read == pytest.approx(gradients, rel=0.01)


def test_a_resident_record_is_flushed_when_the_step_is_committed():
    found = plan(1024 * MIB)
    flushed = {op.unit for op in found.ops if op.kind is Kind.FLUSH}
    assert flushed == set(found.records)
    assert not [op for op in found.without_commit() if op.kind in (Kind.FLUSH, Kind.COMMIT)]


def test_what_does_not_fit_is_refused_with_the_needs_and_the_knobs():
    with pytest.raises(CapacityError) as refusal:
        plan(8 * MIB)
    text = str(refusal.value)
    assert "memory.ram is 8.0 MiB" in text
    assert str(ArenaName.HEAD_ACCUMULATOR) in text
    assert "train.micro_batch" in text


def test_update_memory_does_not_depend_on_the_size_of_a_unit():
    wide = fit(*model(length=32 * MIB), Budget(ram=1 << 30, device_in_ram=False, resident=0))
    narrow = fit(*model(length=MIB), Budget(ram=1 << 30, device_in_ram=False, resident=0))
    assert wide.arenas[ArenaName.UPDATE] == narrow.arenas[ArenaName.UPDATE]


def test_a_model_of_100_billion_is_planned_with_few_operations():
    shape, records = model(layers=80, length=1_200 * MIB)
    found = fit(shape, records, Budget(ram=64 << 30, device_in_ram=False))
    assert found.host_nbytes <= 64 << 30
    assert len(found.ops) < 40_000
