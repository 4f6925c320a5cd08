"""The model families whose streamed training equals plain transformers, as the tests prove."""

from __future__ import annotations

from tiering.errors import RefusedError

SUPPORTED: frozenset[str] = frozenset(
    {
        "llama",
    }
)
"""Values of ``model_type``; each is trained beside plain transformers by a parity test."""


def require_supported(model_type: str) -> None:
    """Return if ``model_type`` is proved.

    Raises:
        RefusedError: It is not; the message lists those that are.
    """
    if model_type not in SUPPORTED:
        raise RefusedError(
            f"model family {model_type!r} has no parity test; supported: "
            f"{', '.join(sorted(SUPPORTED))}; pass any_family to try it anyway"
        )
