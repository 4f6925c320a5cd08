"""Nothing waits for ever: what fails ends the run with its cause, what hangs is named."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint.convert import convert
from checkpoint.schema import Layout
from megatrain import planner
from megatrain.lanes import CpuLanes, LaneError
from megatrain.ops import ArenaName, Kind, Lane, Op, ScheduleError
from megatrain.watchdog import Place, Seat, Watch, Watchdog
from tests.support.faults import Fault
from tests.support.runs import run_config, tiny_llama, token_rows, train
from tiering.backends.zarr3 import Zarr3Backend
from tiering.codecs import Codec, ShardSpec
from tiering.store import open_reader

PATIENCE_S = 60
LANES = list(Lane)


def op(number: int, lane: Lane, *deps: int, unit: str = "layer.000") -> Op:
    return Op(id=number, lane=lane, kind=Kind.FORWARD, unit=unit, deps=deps, nbytes=3 << 20)


def chain() -> list[Op]:
    """One operation in each lane, each after the one before it, twice around."""
    ops = [op(0, LANES[0])]
    for number in range(1, 2 * len(LANES)):
        ops.append(op(number, LANES[number % len(LANES)], number - 1))
    return ops


@contextlib.contextmanager
def made(watch: Watch | None = None) -> Iterator[CpuLanes]:
    lanes = CpuLanes(watch=watch)
    try:
        yield lanes
    finally:
        lanes.close()


def in_time(run: Callable[[], object]) -> BaseException | None:
    """Return what ``run`` raises; it must end."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001  a thread's edge
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it waits for ever"
    return raised[0] if raised else None


def idle_again(lanes: CpuLanes) -> bool:
    """Return whether every lane still does what it is given."""
    done: list[int] = []
    assert in_time(lambda: lanes.run(chain(), lambda o: done.append(o.id))) is None
    return done == list(range(len(chain())))


class Said(logging.Handler):
    """Keeps what is logged, and tells when something is."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.changed:
            self.lines.append(record.getMessage())
            self.changed.notify_all()

    def wait_for(self, text: str) -> str:
        with self.changed:
            found = self.changed.wait_for(
                lambda: next((line for line in self.lines if text in line), None), PATIENCE_S
            )
        assert found, f"nobody said {text!r}: {self.lines}"
        return found


@pytest.fixture
def said() -> Iterator[Said]:
    handler = Said()
    logging.getLogger("megatrain").addHandler(handler)
    yield handler
    logging.getLogger("megatrain").removeHandler(handler)


# -- what fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", LANES)
def test_an_error_in_any_lane_ends_the_list_with_it(lane):
    def handle(o: Op) -> None:
        if o.lane is lane:
            raise OSError(errno.EIO, "drive gone")

    with made() as lanes:
        error = in_time(lambda: lanes.run(chain(), handle))
        assert isinstance(error, OSError)
        assert error.errno == errno.EIO
        assert idle_again(lanes)


def test_a_later_error_does_not_hide_the_first(said):
    begun = threading.Semaphore(0)

    def handle(o: Op) -> None:
        if o.lane is Lane.IO_READ:
            for _ in LANES[1:]:
                assert begun.acquire(timeout=PATIENCE_S)
            raise ValueError("first")
        begun.release()
        said.wait_for("the run has failed")
        raise ValueError(f"later, in {o.lane}")

    with made(Watch(stall_warning_s=0.2)) as lanes:
        error = in_time(lambda: lanes.run([op(i, lane) for i, lane in enumerate(LANES)], handle))
    assert str(error) == "first"


@pytest.mark.parametrize("lane", [Lane.IO_READ, Lane.COMPUTE, Lane.HOST])
@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_would_end_a_thread_ends_the_run_as_a_failure(lane, error):
    def handle(o: Op) -> None:
        if o.lane is lane:
            raise error

    with made() as lanes:
        found = in_time(lambda: lanes.run(chain(), handle))
        assert isinstance(found, LaneError)
        assert str(found) == f"lane {lane} was ended in forward by {error!r}"
        assert found.__cause__ is error
        assert idle_again(lanes)


@pytest.mark.parametrize("lane", LANES)
def test_a_thread_that_is_gone_is_noticed(lane):
    with made(Watch(stall_warning_s=0.2)) as lanes:
        lanes._queues[Seat(lane)].put(None)
        lanes._threads[Seat(lane)].join()
        error = in_time(lambda: lanes.run(chain(), lambda o: None))
        assert str(error) == f"the thread of lane {lane} has ended"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_start_its_work_is_noticed(monkeypatch):
    import torch

    def fail(count: int) -> None:
        raise SystemExit("no threads here")

    monkeypatch.setattr(torch, "set_num_threads", fail)
    lanes: list[CpuLanes] = []
    assert in_time(lambda: lanes.append(CpuLanes(watch=Watch(stall_warning_s=0.2)))) is None
    error = in_time(lambda: lanes[0].run(chain(), lambda o: None))
    assert "the thread of lane" in str(error)
    assert in_time(lanes[0].close) is None


@pytest.mark.parametrize(
    "ops",
    [
        [op(0, Lane.HOST, 1), op(1, Lane.HOST)],
        [op(0, Lane.IO_READ, 1), op(1, Lane.COMPUTE, 2), op(2, Lane.HOST, 0)],
        [op(0, Lane.COMPUTE, 0)],
        [op(0, Lane.COPY_IN), op(1, Lane.HOST, 0, 2), op(2, Lane.COPY_IN, 1)],
    ],
    ids=["behind itself in its lane", "in a circle", "itself", "across two lanes"],
)
def test_a_list_that_cannot_go_on_says_so(ops):
    with made() as lanes:
        error = in_time(lambda: lanes.run(ops, lambda o: None))
        assert str(error).startswith("the schedule cannot go on, each lane waits: ")
        assert idle_again(lanes)


def test_a_list_that_names_an_operation_it_has_not_says_so():
    with made() as lanes:
        assert isinstance(
            in_time(lambda: lanes.run([op(0, Lane.HOST, 7)], lambda o: None)), IndexError
        )


def test_a_schedule_that_runs_out_of_slabs_ends_the_run(tmp_path, monkeypatch, inputs):
    build = planner.build

    def mutated(step: Any) -> tuple[Op, ...]:
        return tuple(
            replace(o, frees=tuple(t for t in o.frees if t.arena is not ArenaName.STAGING))
            for o in build(step)
        )

    monkeypatch.setattr(planner, "build", mutated)
    config = run_config(*inputs, tmp_path / "run", memory__resident=1)
    with pytest.raises(ScheduleError, match="the schedule has run out of staging slabs"):
        train(config)


# -- what hangs ----------------------------------------------------------------------------------


def test_an_operation_that_does_not_end_is_named_with_who_waits_for_it(said):
    ops = [
        op(0, Lane.IO_READ),
        op(1, Lane.COPY_IN, 0),
        op(2, Lane.COMPUTE, 1, unit="layer.001"),
        op(3, Lane.COPY_OUT),
    ]

    def handle(o: Op) -> None:
        if o.lane is Lane.IO_READ:
            said.wait_for("has not moved")

    watch = Watch(stall_warning_s=0.1, files=lambda thread, o: [Path("/d/0/x")])
    with made(watch) as lanes:
        lanes.run(ops, handle)
    line = said.wait_for("has not moved")
    assert line.startswith("lane io_read has not moved for 0 s: forward of layer.000, 3.0 MiB, /d")
    assert line.endswith(
        "waiting for it: copy_in (for forward of layer.000), compute (for forward of layer.001)"
    )


def test_warnings_come_each_after_twice_as_long(caplog):
    dog = Watchdog(Watch(stall_warning_s=10))
    places = {Seat(Lane.HOST): Place(thread=0, op=op(0, Lane.HOST), since=100.0)}
    for now in range(100, 200):
        dog.look(places, {}, float(now))
    assert [line.partition(":")[0].rpartition(" for ")[2] for line in caplog.messages] == [
        "10 s",
        "20 s",
        "40 s",
        "80 s",
    ]


def test_waiting_for_others_is_no_stall(caplog):
    places = {Seat(Lane.HOST): Place(thread=0, op=op(0, Lane.HOST), waiting=True, since=0.0)}
    Watchdog(Watch(stall_warning_s=10)).look(places, {}, 1e6)
    assert not caplog.messages


def test_a_failed_run_says_what_it_still_waits_for_and_then_leaves(said):
    left: list[BaseException] = []
    begun, go = threading.Event(), threading.Event()

    def handle(o: Op) -> None:
        if o.lane is Lane.IO_READ:
            begun.set()
            assert go.wait(PATIENCE_S)
        else:
            assert begun.wait(PATIENCE_S)
            raise ValueError("first")

    def leave(error: BaseException) -> None:
        left.append(error)
        go.set()

    watch = Watch(stall_warning_s=0.1, leave=leave)
    with made(watch) as lanes:
        error = in_time(
            lambda: lanes.run([op(0, Lane.IO_READ), op(1, Lane.HOST), op(2, Lane.IO_READ)], handle)
        )
    assert left == [error]
    line = said.wait_for("the run has failed")
    assert line == (
        "the run has failed and ends once lane io_read does: forward of layer.000, 3.0 MiB; "
        "ValueError: first"
    )


def test_an_interrupted_list_ends_what_it_does_and_begins_nothing_more(said):
    done: list[int] = []

    def handle(o: Op) -> None:
        done.append(o.id)
        os.kill(os.getpid(), signal.SIGINT)
        said.wait_for("the run has failed")

    with made(Watch(stall_warning_s=0.1)) as lanes:
        with pytest.raises(KeyboardInterrupt):
            lanes.run([op(0, Lane.HOST), op(1, Lane.HOST)], handle)
        assert done == [0]
        assert idle_again(lanes)


def test_a_write_that_no_thread_takes_keeps_nobody_waiting(tmp_path):
    (tmp_path / "shard").write_bytes(b"")
    spec = ShardSpec(
        array="a", shard=0, codec=Codec.NONE, itemsize=4, chunk_nbytes=4096, chunks=1, slots=1
    )
    backend = Zarr3Backend("a", writable=True)
    backend.describe(tmp_path / "shard", spec)
    backend._threads.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        backend.write(tmp_path / "shard", 0, memoryview(bytes(4096)))
    assert in_time(lambda: backend.forget(tmp_path / "shard")) is None
    assert in_time(backend.close) is None


# -- whole processes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_llama(folder / "model"), token_rows(folder / "rows.jsonl")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, inputs: tuple[Path, Path]) -> Path:
    store = tmp_path_factory.mktemp("converted") / "store"
    convert(inputs[0], store, layout=Layout.FLOAT32)
    return store


def run_file(tmp_path: Path, converted: Path, inputs: Sequence[Path], **changes: Any) -> Path:
    shutil.copytree(converted, tmp_path / "store", symlinks=True)
    config = run_config(
        tmp_path / "store", inputs[1], tmp_path / "run", memory__resident=1, **changes
    )
    path = tmp_path / "run.yaml"
    path.write_text(config.to_json())
    return path


UNITS = ("outer_in", "layer.000", "layer.001", "outer_out")  # an index each: written when made
HELD_AT = {
    "a read": Fault(op="read", path="/0.layer.001.master.0", count=1, held=True),
    "a write": Fault(op="write", path="/1.layer.001.exp_avg.0", after=1, held=True),
    "a commit": Fault(op="sync", path="manifests/2", count=1, held=True),
}
ASKED = {"a read": signal.SIGINT, "a write": signal.SIGTERM, "a commit": signal.SIGINT}


@pytest.mark.parametrize("place", HELD_AT)
def test_asked_twice_a_run_ends_whatever_it_waits_for(tmp_path, driver, converted, inputs, place):
    path = run_file(tmp_path, converted, inputs)
    command = driver.start(["megatrain", "train", str(path)], tmp_path / "talk", HELD_AT[place])
    command.wait_until_held(HELD_AT[place].op)
    command.send(ASKED[place])
    command.wait_for("stopping")
    command.send(ASKED[place])
    assert command.exit_code() == 130, command.said
    assert "interrupted" in command.said
    assert "Traceback" not in command.said
    with open_reader(tmp_path / "store") as reader:
        assert reader.manifest.step == 0


def test_a_command_ends_whose_main_thread_hangs(tmp_path, driver, inputs):
    held = Fault(op="write", path="layer.001.weights", count=1, held=True)
    arguments = ["megatrain-ckpt", "convert", str(inputs[0]), str(tmp_path / "store")]
    command = driver.start(arguments, tmp_path / "talk", held)
    command.wait_until_held(held.op)
    command.send_until_ended(signal.SIGINT)
    assert command.exit_code() == 130, command.said
    assert "Traceback" not in command.said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_once_a_conversion_ends_and_leaves_nothing(tmp_path, driver, inputs, number):
    held = Fault(op="write", path="layer.001.weights", count=1, held=True)
    arguments = ["megatrain-ckpt", "convert", str(inputs[0]), str(tmp_path / "store")]
    command = driver.start(arguments, tmp_path / "talk", held)
    command.wait_until_held(held.op)
    command.send(number)
    command.let_go(held.op)
    assert command.exit_code() == 130, command.said
    assert command.said.endswith("error: interrupted\n")
    assert not (tmp_path / "store").exists()


def test_a_slow_drive_is_named_and_the_run_goes_on(tmp_path, driver, converted, inputs):
    held = HELD_AT["a read"]
    path = run_file(tmp_path, converted, inputs, train__stall_warning=0.2)
    command = driver.start(["megatrain", "train", str(path)], tmp_path / "talk", held)
    command.wait_until_held(held.op)
    command.wait_for("lane io_read has not moved for")
    command.let_go(held.op)
    assert command.exit_code() == 0, command.said
    line = next(line for line in command.said.splitlines() if "has not moved" in line)
    assert "of layer.001" in line
    assert "layer.001.master" in line.partition("KiB, ")[2], "the file"
    assert "waiting for it: " in line
    with open_reader(tmp_path / "store") as reader:
        assert reader.manifest.step == 3


def test_a_failure_beside_a_lane_that_hangs_ends_the_process_with_its_code(
    tmp_path, driver, converted, inputs
):
    faults = [
        Fault(op="write", path=".exp_avg.0", after=len(UNITS), count=1, held=True),
        Fault(op="read", path="/0.layer.001.exp_avg_sq.0", held=True, errno=errno.EIO),
    ]
    path = run_file(tmp_path, converted, inputs, train__stall_warning=0.3)
    command = driver.start(["megatrain", "train", str(path)], tmp_path / "talk", *faults)
    command.wait_until_held("write")
    command.wait_until_held("read")
    command.let_go("read")
    assert command.exit_code() == 5, command.said
    assert "the run has failed and ends once lane io_write does: write_state" in command.said
    assert "error: cannot read" in command.said.splitlines()[-1]
    assert "Traceback" not in command.said
