"""The configuration and tokenizer files that a store carries, as the folder a library reads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tiering.errors import StorageError


@contextmanager
def as_folder(files: Mapping[str, bytes]) -> Iterator[Path]:
    """Yield a temporary folder that holds ``files``, name to content."""
    with tempfile.TemporaryDirectory(prefix="megatrain-") as name:
        folder = Path(name)
        for file, content in files.items():
            _write(folder / file, content)
        yield folder


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise StorageError("write", path, errno=error.errno or 0, wanted=len(content)) from error
