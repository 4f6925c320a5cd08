"""The planned memory of a run, allocated once and handed out by the holds of the schedule."""

from __future__ import annotations

import torch

from megatrain.ops import DEVICE_ARENAS, ArenaName, Take
from megatrain.planner import Arenas, slab_name
from tiering.arena import Arena


class Memory:
    """Every slab of every arena; on a CPU the device's arenas are host memory too.

    Tensors and views alias the slabs for the life of this object. Host slabs are 4096-aligned.
    """

    def __init__(self, arenas: Arenas, *, host: Arena, device: torch.device) -> None:
        self.device = device
        self._tensors: dict[tuple[ArenaName, int], torch.Tensor] = {}
        self._views: dict[tuple[ArenaName, int], memoryview] = {}
        for name, slabs in arenas.items():
            for index, nbytes in enumerate(slabs):
                if nbytes:
                    self._allocate(name, index, nbytes, host)

    def _allocate(self, name: ArenaName, index: int, nbytes: int, host: Arena) -> None:
        if self.device.type != "cpu" and name in DEVICE_ARENAS:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        else:
            view = host.take(slab_name(name, index), nbytes)
            self._views[name, index] = view
            tensor = torch.frombuffer(view, dtype=torch.uint8)
        self._tensors[name, index] = tensor

    def bytes(self, take: Take) -> memoryview:
        """Return the bytes of a host slab, at least as many as its hold."""
        return self._views[take.arena, take.index]

    def tensor(
        self, take: Take, dtype: torch.dtype, *, offset: int = 0, length: int
    ) -> torch.Tensor:
        """Return ``length`` elements of a slab from byte ``offset`` on, as a 1-D tensor."""
        raw = self._tensors[take.arena, take.index]
        return raw[offset : offset + length * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Drop every tensor and view; what still aliases them keeps the arena from closing."""
        self._tensors.clear()
        self._views.clear()  # not released: torch keeps no hold but the view, and would dangle
