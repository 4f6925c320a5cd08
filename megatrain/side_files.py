"""The configuration and tokenizer files that a store carries, as the folder a library reads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def as_folder(files: Mapping[str, bytes]) -> Iterator[Path]:
    """Yield a temporary folder that holds ``files``, name to content."""
    with tempfile.TemporaryDirectory(prefix="megatrain-") as name:
        folder = Path(name)
        for file, content in files.items():
            place = folder / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        yield folder
