"""What a run takes of the machine's memory altogether: its arenas, and what comes on top."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiering.limits import Limit

RAISE_LOCK = (
    "raise it with ulimit -l, memlock in /etc/security/limits.conf or LimitMEMLOCK of the unit"
)

BOOKS_NBYTES = 4 << 20  # the run's own objects: its files, its queues, the tokens of a window


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Most bytes that a step's computation takes beside the arenas, by what is computed.

    ``rest`` is between these; ``kept`` are what a step keeps from its first computation to its
    last, and the run from its first step to its last. ``threads`` are the drives' own.
    ``device`` is on another memory.
    """

    layers: int = 0
    head: int = 0
    outer: int = 0
    rest: int = 0
    kept: int = 0
    threads: int = 0
    device: int = 0

    @property
    def spare(self) -> int:
        """Bytes for what one measurement does not show: how full the heap's pages come to be."""
        return BOOKS_NBYTES + self._largest // 5

    @property
    def nbytes(self) -> int:
        """Bytes at the worst moment: no two of the computations run at once."""
        return self.kept + self.threads + self._largest + self.spare

    @property
    def _largest(self) -> int:
        return max(self.layers, self.head, self.outer, self.rest)

    def scaled(self, *, tokens: float, chunk: float) -> Workspace:
        """Return the estimate for other numbers of tokens in a micro-batch and a loss chunk."""
        return replace(
            self,
            layers=round(self.layers * tokens),
            head=round(self.head * chunk),
            outer=round(self.outer * tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What comes on top of the arenas, the limits that hold, and whether the arenas are locked.

    Attributes:
        imports: Bytes that the process had resident when it planned, and what comes to that later.
        workspace: What the computation takes, on the host.
        stored: Bytes of the store, and of gradients on drives, whose drives are memory.
        limit: The most memory that the run may have.
        lock: Whether the arenas are locked in memory.
        lock_limit: The most that may be locked.
    """

    imports: int
    workspace: Workspace
    stored: int = 0
    limit: Limit
    lock: bool
    lock_limit: Limit | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the process on top of its arenas."""
        return self.imports + self.workspace.nbytes
