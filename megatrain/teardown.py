"""What is given back at the end, whatever happened before."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from types import TracebackType

log = logging.getLogger(__name__)


class Teardown(ExitStack[None]):
    """An ExitStack in which what fails on the way out never hides what failed first."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give everything back; raise what fails now only if nothing failed before."""
        try:
            super().__exit__(kind, error, trace)
        except Exception as later:
            if error is None or later is error:
                raise
            log.warning("while ending after an error: %s: %s", type(later).__name__, later)
