"""The lanes that run a step's operations: threads, and CUDA streams where there is a GPU.

A lane has one seat, which is a thread, and takes its operations in list order. A lane of several
seats deals its operations out to them in turn, so that as many can be under way at once. An
operation starts when all its dependencies are done; on a GPU, "done" between two device lanes is
an event that the stream waits for, and the host waits for the event only where the host itself
touches the bytes.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from megatrain.ops import Lane, Op, ScheduleError
from megatrain.watchdog import Place, Seat, Watch, Watchdog

log = logging.getLogger(__name__)

Handler = Callable[[Op], None]
DEVICE_LANES = frozenset({Lane.COPY_IN, Lane.COMPUTE, Lane.COPY_OUT})
_LOOK_S = 1.0  # how often whoever waits for the lanes looks after them


class LaneError(Exception):
    """A lane that has ended although nobody closed it."""


class Lanes(Protocol):
    """Runs lists of operations."""

    def run(self, ops: Sequence[Op], handle: Handler) -> None:
        """Return when every operation is done; raise the first error once all lanes are idle."""

    def close(self) -> None:
        """End the threads."""


@dataclass(slots=True)
class _Job:
    """One list being run. All that changes is guarded by ``guard``, and so is what is waited for.

    ``places`` has the lanes that are not through yet, the others are idle.
    """

    ops: Sequence[Op]
    handle: Handler
    places: dict[Seat, Place]
    issued: bytearray
    events: dict[int, torch.cuda.Event] = field(default_factory=dict)
    guard: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    idle: threading.Condition = field(init=False)
    error: BaseException | None = None
    failed_at: float = 0.0

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.guard)
        self.idle = threading.Condition(self.guard)

    def wait_for(self, op: Op, seat: Seat) -> bool:
        """Wait until what ``op`` depends on is issued; False if the job has failed."""
        place = self.places[seat]
        with self.guard:
            place.op, place.waiting, place.since = op, True, time.monotonic()
            self._require_a_way_on()
            self.changed.wait_for(lambda: self.error or self._ready(op))
            place.waiting, place.since = False, time.monotonic()
            return self.error is None

    def _ready(self, op: Op) -> bool:
        return all(self.issued[d] for d in op.deps)

    def issue(self, op: Op) -> None:
        with self.guard:
            self.issued[op.id] = 1
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the job with ``error``, unless it has failed before: the first one is the cause."""
        with self.guard:
            if self.error is None:
                self.error, self.failed_at = error, time.monotonic()
            self.changed.notify_all()
            self.idle.notify_all()

    def leave(self, seat: Seat) -> None:
        with self.guard:
            self.places.pop(seat, None)
            self._require_a_way_on()
            if not self.places:
                self.idle.notify_all()

    def waits(self) -> dict[Lane, frozenset[Lane]]:
        """Return the lanes that each waiting lane waits for."""
        with self.guard:
            found: dict[Lane, frozenset[Lane]] = {}
            for seat, place in self.places.items():
                if place.op is not None and place.waiting:
                    open_deps = (d for d in place.op.deps if not self.issued[d])
                    found.setdefault(seat.lane, frozenset())
                    found[seat.lane] |= {self.ops[d].lane for d in open_deps}
            return found

    def _require_a_way_on(self) -> None:
        """Fail where every lane waits for what none will do: the list is wrong."""
        waiting = [place.op for place in self.places.values() if place.waiting and place.op]
        stuck = len(waiting) == len(self.places) and not any(map(self._ready, waiting))
        if waiting and stuck and self.error is None:
            listed = "; ".join(f"{op.lane}: {op.kind} of {op.unit} for {op.deps}" for op in waiting)
            self.fail(ScheduleError(f"the schedule cannot go on, each lane waits: {listed}"))


class CpuLanes:
    """One thread a seat. ``seats`` says how many a lane has: one, if it is not there."""

    def __init__(
        self, seats: Mapping[Lane, int] | None = None, *, watch: Watch | None = None
    ) -> None:
        self._width = {lane: (seats or {}).get(lane, 1) for lane in Lane}
        every = [Seat(lane, number) for lane in Lane for number in range(self._width[lane])]
        cores = torch.get_num_threads()
        # copies by one thread each: they run beside the computation, which has all cores
        wide = {Lane.COMPUTE: cores, Lane.HOST: cores}
        self._cores = {lane: wide.get(lane, 1) for lane in Lane}
        self._watch = watch or Watch()
        self._queues: dict[Seat, queue.SimpleQueue[_Job | None]] = {
            seat: queue.SimpleQueue() for seat in every
        }
        self._threads = {
            seat: threading.Thread(
                target=self._serve, args=(seat,), name=f"lane-{seat}", daemon=True
            )
            for seat in every
        }
        self._counted = threading.Semaphore(0)
        # narrow lanes first: torch counts OpenMP threads per thread, but MKL's for the process,
        # and the last to set them decides how many cores a matrix product has
        for seat in sorted(every, key=lambda seat: self._cores[seat.lane]):
            self._threads[seat].start()
            self._counted.acquire()

    def run(self, ops: Sequence[Op], handle: Handler) -> None:
        """Run ``ops``; see :class:`Lanes`."""
        places = {seat: Place(thread=thread.ident or 0) for seat, thread in self._threads.items()}
        job = _Job(ops=ops, handle=handle, places=places, issued=bytearray(len(ops)))
        for lane_queue in self._queues.values():
            lane_queue.put(job)
        try:
            self._wait(job)
        except BaseException as error:  # noqa: BLE001  Ctrl-C: no lane may go on alone
            job.fail(error)
            self._wait(job)
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """End and join the threads."""
        for lane_queue in self._queues.values():
            lane_queue.put(None)
        for thread in self._threads.values():
            thread.join()

    # -- the thread that waits -----------------------------------------------------------------

    def _wait(self, job: _Job) -> None:
        """Wait until all lanes are idle, and say so if one of them keeps the others waiting."""
        dog, told, left = Watchdog(self._watch), False, False
        patience_s = self._watch.stall_warning_s
        while places := self._glance(job, min(_LOOK_S, patience_s / 4)):
            now = time.monotonic()
            dog.look(places, job.waits(), now)
            if job.error is None:
                continue
            failed_s = now - job.failed_at
            if failed_s > min(_LOOK_S, patience_s) and not told:
                told = True
                self._tell(job.error, places, dog)
            if failed_s > patience_s and not left:
                left = True
                self._watch.leave(job.error)

    def _glance(self, job: _Job, timeout_s: float) -> Mapping[Seat, Place]:
        """Return the seats that are not idle after ``timeout_s``; sooner if all are."""
        with job.guard:
            job.idle.wait_for(lambda: not job.places, timeout_s)
            for seat in [seat for seat in job.places if not self._threads[seat].is_alive()]:
                # nobody else would say that it does not come back
                job.fail(LaneError(f"the thread of lane {seat} has ended"))
                job.leave(seat)
            return {seat: replace(place) for seat, place in job.places.items()}

    @staticmethod
    def _tell(error: BaseException, places: Mapping[Seat, Place], dog: Watchdog) -> None:
        for seat, place in places.items():
            log.warning(
                "the run has failed and ends once lane %s does: %s; %s: %s",
                seat,
                dog.doing(place),
                type(error).__name__,
                error,
            )

    # -- the threads ---------------------------------------------------------------------------

    def _serve(self, seat: Seat) -> None:
        try:
            # Both are per thread. But a thread's first use of torch's pool takes the number that
            # any thread set last: let that happen now, or all lanes end with that of the last.
            torch.get_num_threads()
            torch.set_num_threads(self._cores[seat.lane])
        finally:  # whatever happens, nobody waits for this thread to have started
            self._counted.release()
        with torch.no_grad():
            while (job := self._queues[seat].get()) is not None:
                try:
                    self._run_ops(seat, job)
                except Exception as error:  # noqa: BLE001  a thread's edge: handed to run()
                    job.fail(error)
                except BaseException as error:  # noqa: BLE001  in a thread it ends nothing
                    job.fail(_ended_by(error, seat, job))
                finally:
                    job.leave(seat)

    def _run_ops(self, seat: Seat, job: _Job) -> None:
        of_lane = (op for op in job.ops if op.lane is seat.lane)
        for op in itertools.islice(of_lane, seat.number, None, self._width[seat.lane]):
            if not job.wait_for(op, seat):
                return
            self._perform(op, job)
            job.issue(op)

    def _perform(self, op: Op, job: _Job) -> None:
        job.handle(op)


def _ended_by(error: BaseException, seat: Seat, job: _Job) -> LaneError:
    """Return what ends the run when a lane was asked to end: it is no way to end a run well."""
    op = job.places[seat].op
    ended = LaneError(f"lane {seat} was ended in {op and op.kind} by {error!r}")
    ended.__cause__ = error
    return ended


class CudaLanes(CpuLanes):
    """The same threads; the three device lanes issue to one stream each.

    Every buffer that crosses streams belongs to a planned arena that outlives the step, and its
    reuse is a dependency in the list. So nothing that the caching allocator may hand out again
    is ever read by a second stream, and no ``record_stream`` is needed for arenas; temporaries
    live and die on the compute stream.
    """

    def __init__(
        self,
        device: torch.device,
        seats: Mapping[Lane, int] | None = None,
        *,
        watch: Watch | None = None,
    ) -> None:
        self._device = device
        self._streams = {lane: _stream(device) for lane in DEVICE_LANES}
        super().__init__(seats, watch=watch)

    def _perform(self, op: Op, job: _Job) -> None:
        waits = [job.events[d] for d in op.deps if job.ops[d].lane in DEVICE_LANES]
        stream = self._streams.get(op.lane)
        if stream is None:
            for event in waits:
                event.synchronize()
            job.handle(op)
            return
        with torch.cuda.stream(stream):
            for event in waits:
                stream.wait_event(event)
            job.handle(op)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
            job.events[op.id] = done

    def run(self, ops: Sequence[Op], handle: Handler) -> None:
        """Run ``ops`` and wait for the streams, so that the next list starts from quiet."""
        torch.cuda.current_stream(self._device).synchronize()  # what filled the arenas is over
        try:
            super().run(ops, handle)
        except BaseException as cause:  # the streams end too: the host's pages are given back soon
            try:
                self._synchronize()
            except Exception as later:  # noqa: BLE001  the first error is the one to be told
                cause.add_note(f"the device then said: {later}")
            raise
        self._synchronize()

    def _synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def make_lanes(device: torch.device, watch: Watch | None = None, *, readers: int = 1) -> Lanes:
    """Return the lanes for ``device``, of which io_read has ``readers`` seats."""
    seats = {Lane.IO_READ: readers}
    if device.type == "cuda":
        return CudaLanes(device, seats, watch=watch)
    return CpuLanes(seats, watch=watch)
