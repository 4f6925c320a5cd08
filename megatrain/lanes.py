"""The lanes that run a step's operations: one thread each, and CUDA streams where there is a GPU.

A lane takes its operations in list order. An operation starts when all its dependencies are
done; on a GPU, "done" between two device lanes is an event that the stream waits for, and the
host waits for the event only where the host itself touches the bytes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatrain.ops import Lane, Op

Handler = Callable[[Op], None]
DEVICE_LANES = frozenset({Lane.COPY_IN, Lane.COMPUTE, Lane.COPY_OUT})


class Lanes(Protocol):
    """Runs lists of operations."""

    def run(self, ops: Sequence[Op], handle: Handler) -> None:
        """Return when every operation is done; raise the first error once all lanes are idle."""

    def close(self) -> None:
        """End the threads."""


@dataclass(slots=True)
class _Job:
    """One list being run. ``issued`` is guarded by ``changed``."""

    ops: Sequence[Op]
    handle: Handler
    busy: int
    issued: bytearray
    events: dict[int, torch.cuda.Event] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    error: BaseException | None = None

    def wait_for(self, deps: Sequence[int]) -> bool:
        """Wait until all of ``deps`` are issued; False if the job has failed."""
        with self.changed:
            self.changed.wait_for(lambda: self.error or all(self.issued[d] for d in deps))
            return self.error is None

    def issue(self, op: Op) -> None:
        with self.changed:
            self.issued[op.id] = 1
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def leave(self) -> None:
        with self.changed:
            self.busy -= 1
            self.changed.notify_all()


class CpuLanes:
    """Six threads. ``threads`` says how many cores each lane's arithmetic may use."""

    def __init__(self, threads: Mapping[Lane, int] | None = None) -> None:
        cores = torch.get_num_threads()
        # copies by one thread each: they run beside the computation, which has all cores
        wide = {Lane.COMPUTE: cores, Lane.HOST: cores}
        self._cores = {lane: (threads or wide).get(lane, 1) for lane in Lane}
        self._queues: dict[Lane, queue.SimpleQueue[_Job | None]] = {
            lane: queue.SimpleQueue() for lane in Lane
        }
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"lane-{lane}", daemon=True)
            for lane in Lane
        ]
        self._counted = threading.Semaphore(0)
        # narrow lanes first: torch counts OpenMP threads per thread, but MKL's for the process,
        # and the last to set them decides how many cores a matrix product has
        threads_of = dict(zip(Lane, self._threads, strict=True))
        for lane in sorted(Lane, key=self._cores.__getitem__):
            threads_of[lane].start()
            self._counted.acquire()

    def run(self, ops: Sequence[Op], handle: Handler) -> None:
        """Run ``ops``; see :class:`Lanes`."""
        job = _Job(ops=ops, handle=handle, busy=len(Lane), issued=bytearray(len(ops)))
        for lane_queue in self._queues.values():
            lane_queue.put(job)
        with job.changed:
            job.changed.wait_for(lambda: job.busy == 0)
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """End and join the threads."""
        for lane_queue in self._queues.values():
            lane_queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, lane: Lane) -> None:
        # Both are per thread. But a thread's first use of torch's pool takes the number that any
        # thread set last: let that happen now, or every lane ends with that of the last to start.
        torch.get_num_threads()
        torch.set_num_threads(self._cores[lane])
        self._counted.release()
        with torch.no_grad():
            while (job := self._queues[lane].get()) is not None:
                try:
                    self._run_lane(lane, job)
                except BaseException as error:  # noqa: BLE001  a thread's edge: handed to run()
                    job.fail(error)
                finally:
                    job.leave()

    def _run_lane(self, lane: Lane, job: _Job) -> None:
        for op in job.ops:
            if op.lane is lane:
                if not job.wait_for(op.deps):
                    return
                self._perform(op, job)
                job.issue(op)

    def _perform(self, op: Op, job: _Job) -> None:
        job.handle(op)


class CudaLanes(CpuLanes):
    """The same threads; the three device lanes issue to one stream each.

    Every buffer that crosses streams belongs to a planned arena that outlives the step, and its
    reuse is a dependency in the list. So nothing that the caching allocator may hand out again
    is ever read by a second stream, and no ``record_stream`` is needed for arenas; temporaries
    live and die on the compute stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {lane: _stream(device) for lane in DEVICE_LANES}
        super().__init__()

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
        finally:  # after an error too: the host's pages are given back soon
            for stream in self._streams.values():
                stream.synchronize()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def make_lanes(device: torch.device) -> Lanes:
    """Return the lanes for ``device``."""
    return CudaLanes(device) if device.type == "cuda" else CpuLanes()
