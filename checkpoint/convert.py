"""From a Hugging Face folder into a new store, piece by piece in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from checkpoint.codec import Bytes, Float32, decode, round_to_bfloat16
from checkpoint.formats.files import RangeReader
from checkpoint.formats.safetensors import tensor_nbytes
from checkpoint.plan import Plan, plan_conversion
from checkpoint.scales import Scale, apply_scale
from checkpoint.schema import SCHEMA_FILE, Layout, Role, Schema, Unit
from checkpoint.windows import Span, Window, aligned, piece_length, windows
from tiering.checksum import ChunkCrc, Table
from tiering.codecs import Codec
from tiering.errors import RefusedError
from tiering.records import ALIGNMENT, Record, round_up
from tiering.store import StoreWriter, create_store

BYTES_PER_ELEMENT = 8 + 4 + 2  # the widest source, the master, the weights

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes to do."""


def convert(
    src: Path,
    store: Path,
    *,
    drives: Sequence[Path] = (),
    layout: Layout = Layout.FP32,
    codec: str | None = None,
    ram: int | None = None,
    weights: str | None = None,
    tie: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    on_progress: Progress | None = None,
) -> Schema:
    """Make ``store`` hold the weights of ``src`` as generation 1 and return its schema.

    Weights of BF16 tensors are the source's bits, others are rounded; masters are exact. The
    memory for pieces is at most ``ram`` bytes and does not depend on the size of a tensor.
    With a ``codec`` the shards are encoded (the zarr tier). ``on_plan`` is called with what will
    be done before anything is written.

    Raises:
        UsageError: There is no such codec.
        RefusedError: The folder or the place cannot be used; nothing was written.
        StorageError: Reading or writing failed; what was written is removed.
    """
    if codec is not None:
        Codec.named(codec)
    piece = piece_length(ram, BYTES_PER_ELEMENT)
    _check_apart(src, store)
    plan = plan_conversion(src, layout=layout, weights=weights, tie=tie)
    if on_plan:
        on_plan(plan)
    files = {SCHEMA_FILE: plan.schema.encode(), **plan.side_files}
    records = [replace(record, codec=codec) for record in plan.schema.records()]
    with create_store(store, records=records, schema_files=files, drives=drives) as writer:
        with RangeReader() as reader:
            checksums = _Filler(plan, writer, reader, piece, on_progress).fill()
        writer.commit(step=0, train_state={}, checksums=checksums)
    return plan.schema


def _check_apart(src: Path, store: Path) -> None:
    inside, outside = store.resolve(), src.resolve()
    if inside.is_relative_to(outside):
        raise RefusedError(f"{store}: lies inside the source folder {src}")


class _Filler:
    """Writes the records of a plan into the working slot; owns the memory for the pieces."""

    def __init__(
        self,
        plan: Plan,
        writer: StoreWriter,
        reader: RangeReader,
        piece: int,
        on_progress: Progress | None,
    ) -> None:
        self._plan = plan
        self._writer = writer
        self._reader = reader
        self._piece = piece
        self._on_progress = on_progress
        self._done = 0
        self._raw = aligned(8 * piece)
        self._master = aligned(4 * piece)
        self._weights = aligned(2 * piece)
        self._scale: Scale | None = None
        self._scales = np.empty((0, 0), np.float32)

    def fill(self) -> Mapping[str, Table]:
        """Write all but the moments, which stay holes; return the checksums of each record."""
        checksums: dict[str, Table] = {}
        for unit in self._plan.schema.units:
            fill = self._fill_trainable if unit.trainable else self._fill_carried
            checksums.update(fill(unit))
        return checksums

    def _fill_trainable(self, unit: Unit) -> Mapping[str, Table]:
        schema = self._plan.schema
        records = {role: schema.record(unit, role) for role in schema.roles(unit)}
        pieces = {Role.MASTER: self._master, Role.WEIGHTS: self._weights}
        sinks = {
            role: _Sink(self._writer, records[role], pieces[role])
            for role in pieces
            if role in records
        }
        for window in windows(unit, self._piece):
            self._decode(window)
            for sink in sinks.values():
                sink.write(window)
        return {records[role].name: sink.table() for role, sink in sinks.items()}

    def _decode(self, window: Window) -> None:
        """Make master and weights hold the values of a window."""
        master, weights = self._master.view("<f4"), self._weights.view("<u2")
        master[: window.length] = 0
        weights[: window.length] = 0
        for span in window.spans:
            raw, values = self._read(span), master[span.start : span.stop]
            decode(raw, span.tensor.dtype, values)
            if scale := self._plan.scales.get(span.tensor.name):
                grid = self._grid(scale)
                apply_scale(values, span.first, span.tensor.shape[1], scale, grid)
            if span.tensor.dtype == "BF16":
                weights[span.start : span.stop] = raw.view("<u2")
            else:
                round_to_bfloat16(values, weights[span.start : span.stop])

    def _grid(self, scale: Scale) -> Float32:
        """Return the scales of a tensor; those of the last one are kept."""
        if self._scale is not scale:
            info = scale.tensor
            raw = np.empty(info.nbytes, np.uint8)
            self._reader.read(self._plan.source.path(info), info.start, raw.data)
            self._scale, self._scales = scale, np.empty(scale.grid, np.float32)
            decode(raw, info.dtype, self._scales.reshape(-1))
        return self._scales

    def _fill_carried(self, unit: Unit) -> Mapping[str, Table]:
        record = self._plan.schema.record(unit, Role.WEIGHTS)
        piece = aligned(record.itemsize * self._piece)
        sink = _Sink(self._writer, record, piece)
        for window in windows(unit, self._piece):
            piece[...] = 0
            for span in window.spans:
                start, stop = span.start * record.itemsize, span.stop * record.itemsize
                piece[start:stop] = self._read(span)
            sink.write(window)
        return {record.name: sink.table()}

    def _read(self, span: Span) -> Bytes:
        """Return the source's bytes of a span, valid until the next call."""
        info = self._plan.origin[span.tensor.name]
        raw = self._raw[: tensor_nbytes(info.dtype, (span.length,))]
        offset = info.start + tensor_nbytes(info.dtype, (span.first,))
        self._reader.read(self._plan.source.path(info), offset, raw.data)
        self._done += raw.nbytes
        if self._on_progress:
            self._on_progress(self._done, self._plan.nbytes)
        return raw


class _Sink:
    """One record being written from start to end out of ``piece``."""

    def __init__(self, writer: StoreWriter, record: Record, piece: Bytes) -> None:
        assert writer.working is not None  # a store that is being made has one
        self._writer = writer
        self._slot = writer.working
        self._record = record
        self._piece = piece
        self._crc = ChunkCrc(record)

    def write(self, window: Window) -> None:
        """Write the elements of a window; the piece's bytes after them become zero."""
        itemsize = self._record.itemsize
        offset, nbytes = window.start * itemsize, window.length * itemsize
        padded = round_up(nbytes, ALIGNMENT)
        self._piece[nbytes:padded] = 0
        self._crc.feed(offset, self._piece[:nbytes].data)
        self._writer.write(self._slot, self._record.name, offset, self._piece[:padded].data)

    def table(self) -> Table:
        """Return the checksums of what was written."""
        return self._crc.table()
