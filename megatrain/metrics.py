"""metrics.jsonl: one JSON object a step, in the order of the steps."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiering import fsops
from tiering.errors import StorageError

log = logging.getLogger(__name__)

Row = dict[str, Any]


class MetricsLog:
    """Appends rows; what was appended is in the file when :meth:`append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any], *, durable: bool = False) -> None:
        """Add one row, which names its ``step``; numbers that are not finite become null.

        With ``durable`` this row, and those before it, outlive a power cut from here on.
        """
        line = json.dumps({key: _finite(value) for key, value in row.items()}, allow_nan=False)
        if not self.path.parent.is_dir():
            fsops.make_dirs(self.path.parent)
        fsops.append(self.path, line.encode() + b"\n")
        if durable:
            self.sync()

    def sync(self) -> None:
        """Make every row outlive a power cut."""
        fsops.fsync_file(self.path)
        fsops.fsync_dir(self.path.parent)

    def read(self) -> list[Row]:
        """Return every whole row; a line that a kill or a power cut has torn is left out."""
        return list(self._rows())

    def truncate_after(self, step: int) -> int:
        """Drop the rows of steps past ``step``, and torn lines; return the number of rows kept.

        The file is replaced in one rename, so a kill leaves the old rows or the new ones.
        """
        if not self.path.exists():
            return 0
        kept = [row for row in self._rows() if row["step"] <= step]
        fresh = self.path.with_name(self.path.name + ".new")
        rows = b"".join(json.dumps(row).encode() + b"\n" for row in kept)
        fsops.replace_file(self.path, rows, fresh=fresh)
        return len(kept)

    def _rows(self) -> Iterator[Row]:
        if not self.path.exists():
            return
        for number, line in enumerate(self._lines(), start=1):
            row = _parse(line)
            if row is None:
                log.warning("%s:%d: left out a torn line", self.path, number)
            else:
                yield row

    def _lines(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                yield from file
        except OSError as error:
            raise StorageError("read", self.path, errno=error.errno or 0) from error


def _parse(line: bytes) -> Row | None:
    if not line.endswith(b"\n"):
        return None  # without its end a line may look whole: "step": 12 of "step": 120
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
