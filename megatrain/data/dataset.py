"""Samples: token ids and labels of one record, made when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from megatrain.data import chat, jsonl
from megatrain.data.jsonl import IGNORED
from megatrain.side_files import as_folder
from tiering.errors import RefusedError

log = logging.getLogger(__name__)

_CHARACTERS_PER_TOKEN = 16  # first guess of how much of a very long text fills a sample


class Tokenizer(chat.ChatTokenizer, Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Token ids and, of equal length, labels: the token itself where it is learned, else -100."""

    input_ids: list[int]
    labels: list[int]
    truncated: bool = False

    @property
    def targets(self) -> int:
        """Labels that a prediction exists for: all but the first."""
        return sum(label != IGNORED for label in self.labels[1:])


class Dataset:
    """The samples of a JSONL file; tokenised at each access.

    ``tokenizer`` may be None when every record brings its ``input_ids``.
    """

    def __init__(
        self, records: jsonl.Index, *, max_seq_len: int, tokenizer: Tokenizer | None = None
    ) -> None:
        self.records = records
        self.max_seq_len = max_seq_len
        self._tokenizer = tokenizer
        self._file = records.path.open("rb")

    @property
    def fingerprint(self) -> str:
        """Sha256 of the file."""
        return self.records.fingerprint

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Sample:
        record = jsonl.read(self.records, self._file.fileno(), i)
        try:
            ids, labels = self._encode(record)
        except chat.TemplateError as error:
            raise RefusedError(f"{self.records.place(i)}: {error}") from error
        return cut(ids, labels, self.max_seq_len)

    def _encode(self, record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        if "input_ids" in record:
            return record["input_ids"], record.get("labels", record["input_ids"])
        if self._tokenizer is None:
            raise ValueError("text and messages need a tokenizer")
        if "messages" in record:
            return chat.encode(self._tokenizer, record["messages"], tools=record.get("tools"))
        ids = encode_text(self._tokenizer, record["text"], self.max_seq_len)
        return ids, ids

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cut(ids: list[int], labels: list[int], length: int) -> Sample:
    """Return a sample of at most ``length`` tokens."""
    return Sample(input_ids=ids[:length], labels=labels[:length], truncated=len(ids) > length)


def encode_text(tokenizer: Tokenizer, text: str, max_seq_len: int) -> list[int]:
    """Return the ids of ``text`` and the end-of-text token; at least one too many if it is longer.

    Only as much of a huge text is tokenised as fills a sample.
    """
    room = max_seq_len * _CHARACTERS_PER_TOKEN
    while room < len(text):
        ids: list[int] = tokenizer(text[:room], verbose=False)["input_ids"]
        if len(ids) > max_seq_len + _CHARACTERS_PER_TOKEN:  # the cut word is past the sample's end
            return ids
        room *= 4
    ids = tokenizer(text, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def open_dataset(
    path: Path,
    *,
    max_seq_len: int,
    tokenizer: Callable[[], Tokenizer],
    vocab_size: int | None = None,
    skip_bad_lines: bool = False,
) -> Dataset:
    """Return the checked samples of ``path``; ``tokenizer`` is called only if one is needed.

    Raises:
        RefusedError: A line that cannot be used, or no sample with anything to learn.
    """
    records = jsonl.scan(path, vocab_size=vocab_size, skip_bad_lines=skip_bad_lines)
    log.info("%s: %d records, %d lines left out", path, len(records), records.skipped)
    maker = tokenizer() if records.kinds - {"input_ids"} else None
    dataset = Dataset(records, max_seq_len=max_seq_len, tokenizer=maker)
    try:
        _require_labels(dataset)
    except BaseException:
        dataset.close()
        raise
    return dataset


def _require_labels(dataset: Dataset) -> None:
    """Look for the first sample with a target: in good data that is the first or second."""
    truncated = False
    for sample in dataset:
        if sample.targets:
            return
        truncated = truncated or sample.truncated
    cause = (
        f"cut to data.max_seq_len={dataset.max_seq_len} they lose it: raise that"
        if truncated
        else "every label is masked (-100), or no turn is the assistant's"
    )
    raise RefusedError(
        f"{dataset.records.path}: none of {len(dataset)} samples has a label to learn from; {cause}"
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder; nothing is fetched."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RefusedError(
            f"{folder} has no usable tokenizer, which text and messages need: {reason}"
        ) from error
    return tokenizer


def tokenizer_from_files(files: Mapping[str, bytes]) -> Tokenizer:
    """Return the tokenizer made of ``files`` (name to content), as a store carries them."""
    with as_folder(files) as folder:
        return load_tokenizer(folder)
