from __future__ import annotations

import pytest
import torch

from megatrain.memory import Memory
from megatrain.ops import ArenaName, Take
from tiering.arena import Arena


def test_a_tensor_that_outlives_its_memory_keeps_the_arena_mapped():
    arena = Arena(8192, lock=False)
    memory = Memory({ArenaName.STAGING: (4096,)}, host=arena, device=torch.device("cpu"))
    take = Take(arena=ArenaName.STAGING, index=0, nbytes=4096)
    tensor = memory.tensor(take, torch.float32, length=8)
    memory.close()
    with pytest.raises(BufferError, match="staging slabs 0"):
        arena.close()
    assert tensor.sum() == 0  # still memory of this process
    del tensor
    arena.close()
