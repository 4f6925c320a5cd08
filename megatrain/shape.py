"""The sizes that a step's schedule depends on; all of them are known before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tiering.records import ALIGNMENT, round_up

PIECE = 1 << 16  # elements; the optimizer's and the norm's piece, the unit of every cut
ACTIVATION_SEATS = 2  # beside one input per layer: the last layer's output and its gradient
ROW_BOUNCE_NBYTES = 256 << 10
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShape:
    """A unit's name and the length of its records in elements."""

    name: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model cut into units, and the largest window of samples that a step may see.

    ``table_length`` counts the embedding table's elements with the gap behind it; the table is
    the first tensor of the first unit. ``weights_itemsize`` maps each stored role to bytes per
    element, ``streamed`` is the role that crosses to the device. ``tokens`` are those of all
    micro-batches of a window, padding included; ``rows`` is the most distinct ones among them.
    """

    units: tuple[UnitShape, ...]
    table_length: int
    tied: bool
    hidden: int
    tokens: int
    micro_batches: int
    rows: int
    loss_chunk: int
    streamed: str
    itemsizes: Mapping[str, int]
    compute_itemsize: int

    @property
    def outer_in(self) -> UnitShape:
        """What runs before the first layer."""
        return self.units[0]

    @property
    def layers(self) -> tuple[UnitShape, ...]:
        """The decoder layers in order."""
        return self.units[1:-1]

    @property
    def outer_out(self) -> UnitShape:
        """What runs after the last layer."""
        return self.units[-1]

    @property
    def roles(self) -> tuple[str, ...]:
        """Every stored role, in the order in which an update writes them."""
        return tuple(self.itemsizes)

    @property
    def updated_roles(self) -> tuple[str, ...]:
        """The roles that an update reads before it writes them."""
        return ("master", *MOMENTS)

    def itemsize(self, role: str) -> int:
        """Bytes per element of a stored role."""
        return self.itemsizes[role]

    @property
    def parameters(self) -> int:
        """Elements of all units, alignment gaps included."""
        return sum(unit.length for unit in self.units)

    # -- the embedding -------------------------------------------------------------------------

    @property
    def rest_length(self) -> int:
        """Elements of the first unit behind its table."""
        return self.outer_in.length - self.table_length

    @property
    def rest_start(self) -> int:
        """Where loading of the rest starts: a multiple of the piece, at or before the rest."""
        return self.table_length // PIECE * PIECE

    @property
    def rest_span(self) -> int:
        """Elements that loading the rest brings, the lead before it included."""
        return self.outer_in.length - self.rest_start if self.rest_length else 0

    @property
    def rows_nbytes(self) -> int:
        """Bytes of the gathered embedding rows."""
        return self.rows * self.hidden * self.compute_itemsize

    @property
    def row_extents(self) -> int:
        """Most bytes that gathering the rows from a drive moves: each row's whole blocks."""
        row = self.hidden * self.compute_itemsize
        per_row = row if row % ALIGNMENT == 0 else round_up(row, ALIGNMENT) + ALIGNMENT
        table = round_up(self.table_length * self.compute_itemsize, ALIGNMENT)
        return min(self.rows * per_row, table)

    @property
    def row_bounce_nbytes(self) -> int:
        """Host bytes through which rows are read: at least one row with its whole blocks."""
        one = round_up(self.hidden * self.compute_itemsize, ALIGNMENT) + ALIGNMENT
        return max(one, min(ROW_BOUNCE_NBYTES, round_up(self.row_extents, ALIGNMENT)))

    @property
    def host_rows_nbytes(self) -> int:
        """Host bytes of the gathered rows and the bounce space behind them."""
        return round_up(self.rows_nbytes, ALIGNMENT) + self.row_bounce_nbytes

    @property
    def outer_buffer_nbytes(self) -> int:
        """Device bytes of the gathered rows and the rest of the first unit."""
        return round_up(self.rows_nbytes, ALIGNMENT) + self.rest_span * self.compute_itemsize

    @property
    def outer_accumulator_nbytes(self) -> int:
        """Device bytes of fp32 gradients of the rows and the rest."""
        rows = round_up(self.rows * self.hidden * 4, ALIGNMENT)
        return rows + self.rest_length * 4

    @property
    def outer_grads_nbytes(self) -> int:
        """Host bytes of the same gradients, rounded to the gradients' dtype."""
        rows = round_up(self.rows * self.hidden * self.grad_itemsize, ALIGNMENT)
        return rows + self.rest_length * self.grad_itemsize

    # -- activations and gradients -------------------------------------------------------------

    @property
    def hidden_nbytes(self) -> int:
        """Bytes of one unit's inputs, all micro-batches of a window."""
        return self.tokens * self.hidden * self.compute_itemsize

    @property
    def grad_itemsize(self) -> int:
        """Bytes per element of a gradient that has left the device."""
        return self.compute_itemsize

    @property
    def layer_accumulator_itemsize(self) -> int:
        """Bytes per element of a layer's gradient: fp32 as soon as something is added up."""
        return 4 if self.micro_batches > 1 else self.compute_itemsize

    @property
    def head_accumulator_itemsize(self) -> int:
        """The same for the head, whose loss is computed in chunks of one micro-batch at a time."""
        added_up = self.micro_batches > 1 or self.tokens > self.loss_chunk
        return 4 if added_up else self.compute_itemsize

    def accumulator_nbytes(self, unit: UnitShape) -> int:
        """Device bytes of a layer's gradient."""
        return unit.length * self.layer_accumulator_itemsize

    @property
    def head_length(self) -> int:
        """Elements that the head needs: the last unit and, when tied, the table."""
        return self.outer_out.length + (self.table_length if self.tied else 0)

    @property
    def head_buffer_nbytes(self) -> int:
        """Device bytes of the head's weights."""
        return self.head_length * self.compute_itemsize

    @property
    def head_accumulator_nbytes(self) -> int:
        """Device bytes of the head's gradient."""
        return self.head_length * self.head_accumulator_itemsize

    def dense_grad_length(self, unit: str) -> int:
        """Elements of a unit's gradient that leave through slabs.

        The first unit's dense gradient is that of a tied head; what its own forward adds are
        rows of the batch, kept apart.
        """
        if unit == self.outer_in.name:
            return self.table_length if self.tied else 0
        return next(u.length for u in self.units if u.name == unit)

    @property
    def gradients_nbytes(self) -> int:
        """Host bytes of all dense gradients together."""
        return sum(
            round_up(self.dense_grad_length(unit.name) * self.grad_itemsize, ALIGNMENT)
            for unit in self.units
        )

    # -- slabs ---------------------------------------------------------------------------------

    def update_sections(self, slab_length: int) -> Mapping[str, tuple[int, int]]:
        """Return offset and bytes of each role, and of the gradient, inside an update slab."""
        sections, offset = {}, 0
        for role, itemsize in (*self.itemsizes.items(), ("grads", self.grad_itemsize)):
            nbytes = round_up(slab_length * itemsize, ALIGNMENT)
            sections[role] = (offset, nbytes)
            offset += nbytes
        return MappingProxyType(sections)

    def update_slab_nbytes(self, slab_length: int) -> int:
        """Bytes of one update slab."""
        return sum(nbytes for _, nbytes in self.update_sections(slab_length).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the planner chose within the budget: it changes speed, never a number."""

    slab_length: int
    staging_slabs: int
    grad_slabs: int
    update_slabs: int
    gradients_in_ram: bool
    buffers: int = 2
    accumulators: int = 2

    def __post_init__(self) -> None:
        if self.slab_length % PIECE:
            raise ValueError(f"slab length {self.slab_length} is no multiple of {PIECE}")
