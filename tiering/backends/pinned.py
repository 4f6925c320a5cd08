"""Host memory that a GPU may read and write on its own. The only file here that knows torch."""

from __future__ import annotations

import logging
import sys
from typing import Any

_log = logging.getLogger(__name__)


def cuda_in_use() -> bool:
    """Whether this process has loaded torch and torch sees a GPU. Imports nothing by itself."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def register(address: int, nbytes: int) -> bool:
    """Page-lock memory for the GPU; False with a logged reason if the driver refuses."""
    code = int(_cudart().cudaHostRegister(address, nbytes, 0))
    if code:
        _log.warning("cudaHostRegister of %d B failed with code %d: copies block", nbytes, code)
    return code == 0


def unregister(address: int) -> None:
    """Undo ``register``; the memory may be unmapped afterwards."""
    code = int(_cudart().cudaHostUnregister(address))
    if code:
        _log.warning("cudaHostUnregister failed with code %d", code)


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
