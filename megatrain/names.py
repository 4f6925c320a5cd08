"""What to say when another program's module has one of our names and comes first."""

from __future__ import annotations

import sys
from pathlib import Path

_OURS = ("checkpoint", "tiering")
_EXIT_REFUSED = 3


def refuse(error: ImportError) -> SystemExit:
    """Return the exit that explains ``error``, told on standard error.

    Raises:
        ImportError: ``error`` itself, if it has another reason.
    """
    home = Path(__file__).resolve().parents[1]
    taken = [(name, file) for name in _OURS if (file := _file(name)) and home not in file.parents]
    if not taken:
        raise error
    for name, file in taken:
        print(  # noqa: T201
            f"error: {name} is {file}, not MegaTrain's {home / name}; rename it, take its folder "
            "off PYTHONPATH, or start in another folder",
            file=sys.stderr,
        )
    return SystemExit(_EXIT_REFUSED)


def _file(name: str) -> Path | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).resolve() if file else None
