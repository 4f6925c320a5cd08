from __future__ import annotations

import re
import threading

import pytest
import torch

from megatrain.lanes import CpuLanes
from megatrain.ops import Kind, Lane, Op


@pytest.fixture
def lanes(two_threads):
    made = CpuLanes()
    yield made
    made.close()


def op(number: int, lane: Lane, *deps: int) -> Op:
    return Op(id=number, lane=lane, kind=Kind.FORWARD, unit="", deps=deps)


def test_an_operation_waits_for_its_dependencies_in_other_lanes(lanes):
    ops = [op(0, Lane.IO_READ), op(1, Lane.COPY_IN, 0), op(2, Lane.COMPUTE, 1), op(3, Lane.HOST, 0)]
    done: list[int] = []
    lanes.run(ops, lambda o: done.append(o.id))
    assert sorted(done) == [0, 1, 2, 3]
    assert done.index(0) < done.index(1) < done.index(2)
    assert done.index(0) < done.index(3)


def test_lanes_run_beside_each_other(lanes):
    meeting = threading.Barrier(2, timeout=30)
    lanes.run([op(0, Lane.IO_READ), op(1, Lane.COMPUTE)], lambda o: meeting.wait())


def test_a_lane_keeps_the_order_of_the_list(lanes):
    done: list[int] = []
    lanes.run([op(i, Lane.HOST) for i in range(50)], lambda o: done.append(o.id))
    assert done == list(range(50))


def test_a_lane_of_several_seats_has_as_many_operations_under_way():
    made = CpuLanes({Lane.IO_READ: 3})
    meeting = threading.Barrier(3, timeout=30)
    try:
        made.run([op(i, Lane.IO_READ) for i in range(6)], lambda o: meeting.wait())
    finally:
        made.close()


def test_an_error_in_any_seat_ends_the_others():
    made = CpuLanes({Lane.IO_READ: 3})
    done: list[int] = []

    def handle(o: Op) -> None:
        if o.id == 1:
            raise ValueError("drive gone")
        done.append(o.id)

    ops = [op(0, Lane.IO_READ), op(1, Lane.IO_READ), op(2, Lane.IO_READ, 1), op(3, Lane.HOST, 2)]
    try:
        with pytest.raises(ValueError, match="drive gone"):
            made.run(ops, handle)
    finally:
        made.close()
    assert done in ([], [0])


def test_the_first_error_reaches_the_caller_and_nothing_that_depends_on_it_runs(lanes):
    done: list[int] = []

    def handle(o: Op) -> None:
        if o.id == 0:
            raise ValueError("drive gone")
        done.append(o.id)

    with pytest.raises(ValueError, match="drive gone"):
        lanes.run([op(0, Lane.IO_READ), op(1, Lane.COMPUTE, 0), op(2, Lane.HOST, 1)], handle)
    assert done == []


def test_lanes_can_be_used_again_after_an_error(lanes):
    def fail(o: Op) -> None:
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        lanes.run([op(0, Lane.HOST)], fail)
    done: list[int] = []
    lanes.run([op(0, Lane.HOST)], lambda o: done.append(o.id))
    assert done == [0]


def test_no_lane_records_gradients_and_copies_use_one_thread(lanes):
    seen: dict[Lane, tuple[bool, int]] = {}

    def look(o: Op) -> None:
        seen[o.lane] = (torch.is_grad_enabled(), torch.get_num_threads())

    lanes.run([op(i, lane) for i, lane in enumerate(Lane)], look)
    assert not any(grad for grad, _ in seen.values())
    assert seen[Lane.COPY_IN][1] == seen[Lane.COPY_OUT][1] == 1


def test_a_matrix_product_keeps_all_cores_beside_the_narrow_lanes(lanes):
    said: list[str] = []
    lanes.run([op(0, Lane.COMPUTE)], lambda o: said.append(torch.__config__.parallel_info()))
    found = re.search(r"mkl_get_max_threads\(\) : (\d+)", said[0])
    if found is None:
        pytest.skip("this torch has no MKL")
    assert int(found[1]) == torch.get_num_threads()


def test_arithmetic_keeps_every_core_once_torch_has_used_its_threads(lanes):
    cores = torch.get_num_threads()
    seen: dict[Lane, int] = {}

    def work(o: Op) -> None:
        torch.ones(1 << 20).add_(1)  # large enough for torch's own pool of threads
        seen[o.lane] = torch.get_num_threads()

    lanes.run([op(i, lane) for i, lane in enumerate(Lane)], work)
    assert seen[Lane.COMPUTE] == seen[Lane.HOST] == cores
    assert seen[Lane.IO_READ] == seen[Lane.COPY_IN] == seen[Lane.COPY_OUT] == 1


def test_close_ends_every_thread():
    made = CpuLanes()
    made.close()
    assert not [
        t
        for t in threading.enumerate()
        if t.name.startswith("lane-") and t.is_alive() and t in made._threads
    ]
