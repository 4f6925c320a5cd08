"""One training step as data: the operations, their lanes, dependencies and memory.

Nothing here moves a byte. The executor runs the list on real lanes; the planner adds it up. What
overlaps with what is decided by the order of the list alone: a lane takes its operations in list
order, and an operation starts when its lane reaches it and its dependencies are done.

Elements are counted from the start of a unit's record. Spans are cut at multiples of the slab
length, so their byte offsets suit direct transfers and the optimizer's arithmetic alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.oplist import OpList, Ring, padded, spans
from megatrain.ops import ArenaName, Kind, Lane, Move, Op, Step, Take
from megatrain.shape import ACTIVATION_SEATS, UnitShape
from tiering.records import Tier


def build(step: Step) -> tuple[Op, ...]:
    """Return the operations of one step with the update at its end.

    Forward and backward run every micro-batch of a unit before the next unit, so the weights
    cross once per pass whatever the accumulation. No update starts before the norm of all
    gradients is known.
    """
    builder = _StepBuilder(step)
    builder.forward()
    builder.backward()
    builder.update()
    builder.commit()
    return tuple(builder.ops)


class _StepBuilder(OpList):
    """Appends operations; the methods in call order are the default schedule."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.shape = step.shape
        self.sizes = step.sizes
        self.staging = Ring(ArenaName.STAGING, step.sizes.staging_slabs)
        self.buffers = Ring(ArenaName.BUFFERS, step.sizes.buffers)
        self.accumulators = Ring(ArenaName.ACCUMULATORS, step.sizes.accumulators)
        self.grad_slabs = Ring(ArenaName.GRAD_SLABS, step.sizes.grad_slabs)
        self.update_slabs = Ring(ArenaName.UPDATE, step.sizes.update_slabs)
        self.squares: list[int] = []
        self.grads_ready: dict[str, dict[int, int]] = {}
        self.held_grads: dict[str, Take] = {}
        self.norm = -1
        self.updates: list[int] = []
        self.flushes: list[int] = []

    # -- weights in ----------------------------------------------------------------------------

    def load(
        self, unit: str, start: int, stop: int, target: Take, *, deps: Sequence[int], fresh: bool
    ) -> int:
        """Bring a span of the streamed record into ``target``; return the last copy.

        ``fresh`` says that this load is the one that takes ``target``.
        """
        role = self.shape.streamed
        itemsize = self.shape.itemsize(role)
        takes = (target,) if fresh else ()
        if self.step.resident(unit, role):
            nbytes = (stop - start) * itemsize
            move = Move(tier=self.step.tier(unit, role), read=nbytes)
            return self.add(
                Lane.COPY_IN,
                Kind.COPY_WEIGHTS,
                unit,
                (start, stop),
                deps=deps,
                takes=takes,
                target=target,
                moves=(move,),
            )
        last = -1
        for a, b in spans(start, stop, self.sizes.slab_length):
            slab, reuse = self.staging.take(self.sizes.slab_length * itemsize)
            nbytes = padded(b - a, itemsize)
            read = self.add(
                Lane.IO_READ,
                Kind.READ_WEIGHTS,
                unit,
                (a, b),
                deps=reuse,
                takes=(slab,),
                target=slab,
                moves=(Move(tier=self.step.tier(unit, role), read=nbytes),),
            )
            last = self.add(
                Lane.COPY_IN,
                Kind.COPY_WEIGHTS,
                unit,
                (a, b),
                deps=(read, *deps),
                takes=takes,
                frees=(slab,),
                source=slab,
                target=target,
                nbytes=(b - a) * itemsize,
            )
            takes = ()
            self.staging.free(slab, last)
        return last

    def reads_in_place(self, unit: str, length: int) -> list[Move]:
        """Return what the device reads of a record that it computes with in place."""
        if not self.step.in_place(unit):
            return []
        role = self.shape.streamed
        nbytes = length * self.shape.itemsize(role)
        return [Move(tier=self.step.tier(unit, role), read=nbytes)]

    def load_layer(self, unit: UnitShape) -> tuple[Take | None, tuple[int, ...]]:
        """Bring a layer into a buffer; None when the device computes with its record in place."""
        if self.step.in_place(unit.name):
            return None, ()
        nbytes = unit.length * self.shape.itemsize(self.shape.streamed)
        buffer, reuse = self.buffers.take(nbytes)
        return buffer, (self.load(unit.name, 0, unit.length, buffer, deps=reuse, fresh=True),)

    # -- forward -------------------------------------------------------------------------------

    def forward(self) -> None:
        """Embedding rows, capture, then the layers in order."""
        shape = self.shape
        outer = shape.outer_in.name
        rows = Take(arena=ArenaName.HOST_ROWS, index=0, nbytes=shape.host_rows_nbytes)
        self.outer = Take(arena=ArenaName.OUTER, index=0, nbytes=shape.outer_buffer_nbytes)
        tier = self.step.tier(outer, shape.streamed)
        moved = (
            shape.rows_nbytes if self.step.resident(outer, shape.streamed) else shape.row_extents
        )
        read = self.add(
            Lane.IO_READ,
            Kind.READ_ROWS,
            outer,
            takes=(rows,),
            target=rows,
            moves=(Move(tier=tier, read=moved),),
        )
        ready = [
            self.add(
                Lane.COPY_IN,
                Kind.COPY_ROWS,
                outer,
                deps=(read,),
                takes=(self.outer,),
                frees=(rows,),
                source=rows,
                target=self.outer,
                nbytes=shape.rows_nbytes,
            )
        ]
        if shape.rest_length:
            start, stop = shape.rest_start, shape.outer_in.length
            ready.append(self.load(outer, start, stop, self.outer, deps=(), fresh=False))
        self.activations = [
            Take(arena=ArenaName.ACTIVATIONS, index=i, nbytes=shape.hidden_nbytes)
            for i in range(len(shape.layers) + ACTIVATION_SEATS)
        ]
        self.add(Lane.COMPUTE, Kind.CAPTURE, outer, deps=ready, takes=self.activations[:1])
        for index, unit in enumerate(shape.layers):
            buffer, loaded = self.load_layer(unit)
            done = self.add(
                Lane.COMPUTE,
                Kind.FORWARD,
                unit.name,
                deps=loaded,
                takes=(self.activations[index + 1],),
                frees=_some(buffer),
                source=buffer,
                moves=self.reads_in_place(unit.name, unit.length),
                flops=2.0 * shape.tokens * unit.length,
            )
            if buffer:
                self.buffers.free(buffer, done)

    # -- backward ------------------------------------------------------------------------------

    def backward(self) -> None:
        """Head with its loss, the layers in reverse, the outer part, then the norm."""
        self.head()
        for index, unit in reversed(list(enumerate(self.shape.layers))):
            self.backward_layer(index, unit)
        self.outer_backward()
        self.norm = self.add(Lane.HOST, Kind.NORM, "", deps=self.squares)

    def backward_layer(self, index: int, unit: UnitShape) -> None:
        buffer, loaded = self.load_layer(unit)
        in_place = self.step.gradients_in_place()
        reuse: tuple[int, ...] = ()
        if in_place:
            accumulator = self.gradient_place(unit.name, unit.length)
        else:
            accumulator, reuse = self.accumulators.take(self.shape.accumulator_nbytes(unit))
        done = self.add(
            Lane.COMPUTE,
            Kind.BACKWARD,
            unit.name,
            deps=(*loaded, *reuse),
            takes=(accumulator,),
            frees=(*_some(buffer), self.activations[index + 1]),
            source=buffer,
            target=accumulator,
            moves=self.reads_in_place(unit.name, unit.length),
            flops=6.0 * self.shape.tokens * unit.length,
        )
        if buffer:
            self.buffers.free(buffer, done)
        if in_place:
            self.sum_in_place(unit, accumulator, done)
            return
        last = self.grads_out(unit.name, unit.length, accumulator, done)
        self.free_at(last, accumulator)
        self.accumulators.free(accumulator, last)

    def gradient_place(self, unit: str, length: int) -> Take:
        """Return where a unit's gradient waits in RAM."""
        nbytes = padded(length, self.shape.grad_itemsize)
        index = len(self.held_grads)
        take = Take(arena=ArenaName.GRADIENTS, index=index, nbytes=nbytes)
        self.held_grads[unit] = take
        return take

    def sum_in_place(self, unit: UnitShape, place: Take, done: int) -> None:
        """Add up the squares of a gradient that never leaves its place."""
        ready = self.grads_ready.setdefault(unit.name, {})
        for a, b in spans(0, unit.length, self.sizes.slab_length):
            square = self.add(
                Lane.HOST, Kind.SUM_SQUARES, unit.name, (a, b), deps=(done,), source=place
            )
            self.squares.append(square)
            ready[a] = square

    def head(self) -> None:
        shape = self.shape
        out = shape.outer_out
        buffer = Take(arena=ArenaName.HEAD, index=0, nbytes=shape.head_buffer_nbytes)
        accumulator = Take(
            arena=ArenaName.HEAD_ACCUMULATOR, index=0, nbytes=shape.head_accumulator_nbytes
        )
        # the rows that the window touches are cut out of a tied head's gradient into this one
        self.outer_accumulator = Take(
            arena=ArenaName.OUTER_ACCUMULATOR, index=0, nbytes=shape.outer_accumulator_nbytes
        )
        parts = [(out.name, out.length)]
        if shape.tied:
            parts.append((shape.outer_in.name, shape.table_length))
        loads = [part for part in parts if not self.step.in_place(part[0])]
        deps = [
            self.load(name, 0, length, buffer, deps=(), fresh=number == 0)
            for number, (name, length) in enumerate(loads)
        ]
        done = self.add(
            Lane.COMPUTE,
            Kind.HEAD,
            out.name,
            deps=deps,
            takes=(accumulator, self.outer_accumulator, self.activations[-1]),
            frees=(buffer,) if loads else (),
            source=buffer if loads else None,
            target=accumulator,
            moves=[move for part in parts for move in self.reads_in_place(*part)],
            flops=6.0 * shape.tokens * (shape.table_length if shape.tied else out.length),
        )
        last = self.grads_out(out.name, out.length, accumulator, done)
        if shape.tied:
            last = self.grads_out(shape.outer_in.name, shape.table_length, accumulator, done)
        self.free_at(last, accumulator)

    def grads_out(self, unit: str, length: int, accumulator: Take, done: int) -> int:
        """Move a unit's gradient off the device, slab by slab; return the last copy."""
        keep = self.sizes.gradients_in_ram
        itemsize = self.shape.grad_itemsize
        ready = self.grads_ready.setdefault(unit, {})
        last = done
        no_reuse: tuple[int, ...] = ()
        if keep:
            self.gradient_place(unit, length)
        for a, b in spans(0, length, self.sizes.slab_length):
            if keep:
                slab, reuse = self.held_grads[unit], no_reuse
                takes = (slab,) if a == 0 else ()
            else:
                slab, reuse = self.grad_slabs.take(self.sizes.slab_length * itemsize)
                takes = (slab,)
            last = self.add(
                Lane.COPY_OUT,
                Kind.COPY_GRADS,
                unit,
                (a, b),
                deps=(done, *reuse),
                takes=takes,
                source=accumulator,
                target=slab,
                nbytes=(b - a) * itemsize,
            )
            square = self.add(Lane.HOST, Kind.SUM_SQUARES, unit, (a, b), deps=(last,), source=slab)
            self.squares.append(square)
            ready[a] = square if keep else self.write_grads(unit, (a, b), slab, square)
        return last

    def write_grads(self, unit: str, span: tuple[int, int], slab: Take, square: int) -> int:
        nbytes = padded(span[1] - span[0], self.shape.grad_itemsize)
        # after the sum of squares: the slab is freed once, by the last of its two readers
        write = self.add(
            Lane.IO_WRITE,
            Kind.WRITE_GRADS,
            unit,
            span,
            deps=(square,),
            frees=(slab,),
            source=slab,
            moves=(Move(tier=Tier.NVME, written=nbytes),),
        )
        self.grad_slabs.free(slab, write)
        return write

    def outer_backward(self) -> None:
        """Gradients of what runs before the first layer; the batch's rows stay in RAM."""
        shape = self.shape
        outer = shape.outer_in.name
        self.outer_grads = Take(
            arena=ArenaName.OUTER_GRADS, index=0, nbytes=shape.outer_grads_nbytes
        )
        done = self.add(
            Lane.COMPUTE,
            Kind.OUTER_BACKWARD,
            outer,
            deps=(),
            frees=(self.outer, self.activations[0], self.activations[-1]),
            source=self.outer,
            target=self.outer_accumulator,
        )
        copied = self.add(
            Lane.COPY_OUT,
            Kind.COPY_OUTER_GRADS,
            outer,
            deps=(done,),
            takes=(self.outer_grads,),
            frees=(self.outer_accumulator,),
            source=self.outer_accumulator,
            target=self.outer_grads,
            nbytes=shape.outer_grads_nbytes,
        )
        square = self.add(
            Lane.HOST, Kind.SUM_SQUARES, outer, deps=(copied,), source=self.outer_grads
        )
        self.squares.append(square)

    # -- update --------------------------------------------------------------------------------

    def update(self) -> None:
        """Update every unit slab by slab: read, Adam, write, three lanes overlapped."""
        for unit in self.shape.units:
            for a, b in spans(0, unit.length, self.sizes.slab_length):
                self.update_slab(unit.name, (a, b), last=b == unit.length)
            if self.step.commit:
                self.flush_resident(unit)
        self.free_at(self.updates[-1], self.outer_grads)

    def update_slab(self, unit: str, span: tuple[int, int], *, last: bool) -> None:
        """Update one span; what is resident is updated where it lies, without a slab."""
        reads, writes, grads = self.update_moves(unit, span)
        ready = self.grads_ready.get(unit, {}).get(span[0])
        waits = () if ready is None else (ready,)
        slab, reuse = self.update_slab_for(bool(reads or writes or grads))
        fetches = [(Kind.READ_STATE, reads, reuse), (Kind.READ_GRADS, grads, (*reuse, *waits))]
        takes, deps = _some(slab), [self.norm, *waits, *reuse]
        taken: tuple[int, ...] = ()
        for kind, moves, after in fetches:
            if moves:
                op = self.add(
                    Lane.IO_READ,
                    kind,
                    unit,
                    span,
                    deps=(*after, *taken),
                    takes=takes,
                    target=slab,
                    moves=moves,
                )
                takes, taken = (), (op,)
                deps.append(op)
        frees = _some(self.held_grads.get(unit)) if last else ()
        done = self.add(
            Lane.HOST,
            Kind.UPDATE,
            unit,
            span,
            deps=deps,
            takes=takes,
            frees=frees if writes else (*frees, *_some(slab)),
            source=slab,
            moves=self.resident_moves(unit, span),
            flops=float(span[1] - span[0]),
        )
        if writes and slab:
            done = self.write_state(unit, span, slab, writes, done)
        if slab:
            self.update_slabs.free(slab, done)
        self.updates.append(done)

    def update_slab_for(self, staged: bool) -> tuple[Take | None, tuple[int, ...]]:
        """Return the next update slab and what must end before its use; None if not needed."""
        if not staged:
            return None, ()
        return self.update_slabs.take(self.shape.update_slab_nbytes(self.sizes.slab_length))

    def write_state(
        self, unit: str, span: tuple[int, int], slab: Take, writes: Sequence[Move], updated: int
    ) -> int:
        return self.add(
            Lane.IO_WRITE,
            Kind.WRITE_STATE,
            unit,
            span,
            deps=(updated,),
            frees=(slab,),
            source=slab,
            moves=writes,
        )

    def update_moves(
        self, unit: str, span: tuple[int, int]
    ) -> tuple[list[Move], list[Move], list[Move]]:
        """Return what a slab's update reads and writes on drives, and the gradient it reads."""
        length = span[1] - span[0]
        reads, writes = [], []
        for role in self.shape.roles:
            if self.step.resident(unit, role):
                continue
            tier = self.step.tier(unit, role)
            nbytes = padded(length, self.shape.itemsize(role))
            if role in self.shape.updated_roles:
                reads.append(Move(tier=tier, read=nbytes))
            writes.append(Move(tier=tier, written=nbytes))
        grads = []
        if not self.sizes.gradients_in_ram and span[0] in self.grads_ready.get(unit, {}):
            stored = min(span[1], self.shape.dense_grad_length(unit)) - span[0]
            nbytes = padded(stored, self.shape.grad_itemsize)
            grads.append(Move(tier=Tier.NVME, read=nbytes))
        return reads, writes, grads

    def resident_moves(self, unit: str, span: tuple[int, int]) -> list[Move]:
        length = span[1] - span[0]
        moves = []
        for role in self.shape.roles:
            if self.step.resident(unit, role):
                nbytes = length * self.shape.itemsize(role)
                read = nbytes if role in self.shape.updated_roles else 0
                moves.append(Move(tier=self.step.tier(unit, role), read=read, written=nbytes))
        return moves

    # -- commit --------------------------------------------------------------------------------

    def flush_resident(self, unit: UnitShape) -> None:
        """Write what only RAM holds to the working slot."""
        for role in self.shape.roles:
            if not self.step.resident(unit.name, role):
                continue
            nbytes = padded(unit.length, self.shape.itemsize(role))
            flushed = self.add(
                Lane.IO_WRITE,
                Kind.FLUSH,
                f"{unit.name}.{role}",
                (0, unit.length),
                deps=self.updates[-1:],
                moves=(Move(tier=self.step.homes[f"{unit.name}.{role}"], written=nbytes),),
            )
            self.flushes.append(flushed)

    def commit(self) -> None:
        """Make the working slot the next generation."""
        if self.step.commit:
            self.add(Lane.HOST, Kind.COMMIT, "", deps=(*self.updates[-1:], *self.flushes[-1:]))


def _some(take: Take | None) -> tuple[Take, ...]:
    return () if take is None else (take,)
