"""Whatever a file holds, its user gets a sentence and not a traceback."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatrain.config import RunConfig, load_run
from megatrain.data import jsonl
from tiering.errors import RefusedError, UsageError

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
keys = st.sampled_from(["text", "messages", "input_ids", "labels", "role", "content"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)
lines = st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode())
yaml_words = st.sampled_from(
    ["model", "out", "data", "train", ":", " ", "\n", "- ", "{", "}", "&a", "*a", "<<", "1e-5", "~"]
)


@contextmanager
def file_of(content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        yield path


@settings(deadline=None)
@given(st.lists(lines, max_size=4))
def test_any_data_file_is_read_or_refused(content: list[bytes]):
    with file_of(b"\n".join(content)) as path, suppress(RefusedError):
        index = jsonl.scan(path, vocab_size=100)
        with path.open("rb") as file:
            for i in range(len(index)):
                assert jsonl.check(jsonl.read(index, file.fileno(), i), 100) in index.kinds


@settings(deadline=None)
@given(
    st.binary(max_size=60) | st.lists(yaml_words, max_size=20).map(lambda w: "".join(w).encode())
)
@example(b"a: &a [*a]")
@example(b"a: &a {b: *a}")
@example(b"? {a: 1}\n: 2")
@example(b"1: 2")
@example(b"2026-13-45: 1")
@example(b"[" * 999)
@example(b"model: ~nobody/x\nout: o\ndata: {train: t}")
def test_any_run_file_is_read_or_refused(content: bytes):
    with file_of(content) as path, suppress(UsageError):
        assert isinstance(load_run(path), RunConfig)
