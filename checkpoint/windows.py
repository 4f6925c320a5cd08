"""Pieces of a record: which elements of which tensors lie in them, and memory to move them in."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from checkpoint.schema import Tensor, Unit
from tiering.errors import UsageError
from tiering.records import ALIGNMENT, round_up

PIECE_LENGTH = 1 << 20  # elements; 4 MiB of float32, and one chunk of every record
PIECE_MULTIPLE = ALIGNMENT  # elements; a multiple of the alignment for every width of element


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements ``[first, last)`` of ``tensor``, which lie ``start`` elements into a window."""

    tensor: Tensor
    first: int
    last: int
    start: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.last - self.first

    @property
    def stop(self) -> int:
        """Where the span ends in the window."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Elements ``[start, start + length)`` of a unit's records; between the spans lie zeros."""

    start: int
    length: int
    spans: tuple[Span, ...]


def windows(unit: Unit, piece: int) -> Iterator[Window]:
    """Yield the windows of at most ``piece`` elements that make up a unit, in order."""
    ends = [tensor.end for tensor in unit.tensors]
    for start in range(0, unit.length, piece):
        stop = min(start + piece, unit.length)
        yield Window(start=start, length=stop - start, spans=tuple(_spans(unit, ends, start, stop)))


def _spans(unit: Unit, ends: list[int], start: int, stop: int) -> Iterator[Span]:
    for tensor in unit.tensors[bisect_right(ends, start) :]:
        if tensor.offset >= stop:
            return
        first, last = max(start, tensor.offset), min(stop, tensor.end)
        if last > first:
            yield Span(
                tensor=tensor,
                first=first - tensor.offset,
                last=last - tensor.offset,
                start=first - start,
            )


def piece_length(ram: int | None, bytes_per_element: int) -> int:
    """Return how many elements to move at a time, given the bytes of memory each one takes.

    Raises:
        UsageError: ``ram`` is too little for the smallest piece.
    """
    if ram is None:
        return PIECE_LENGTH
    length = min(PIECE_LENGTH, ram // bytes_per_element) // PIECE_MULTIPLE * PIECE_MULTIPLE
    if not length:
        least = PIECE_MULTIPLE * bytes_per_element
        raise UsageError(f"--ram {ram} B is too little: the smallest piece needs {least} B")
    return length


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory for direct transfers: page-aligned, rounded up to whole pages."""
    return np.frombuffer(mmap.mmap(-1, round_up(max(nbytes, 1), ALIGNMENT)), np.uint8)
