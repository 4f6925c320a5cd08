"""Samples: token ids and labels of one record, made when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
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

    def get_vocab(self) -> dict[str, int]:
        """Return every token with its id."""
        ...


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
        if "input_ids" in record:
            ids = record["input_ids"]
            return cut(ids, record.get("labels", ids), self.max_seq_len)
        if self._tokenizer is None:
            raise ValueError("text and messages need a tokenizer")
        try:
            return tokenise(self._tokenizer, record, self.max_seq_len)
        except chat.TemplateError as error:
            raise RefusedError(f"{self.records.place(i)}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tokenise(tokenizer: Tokenizer, record: Mapping[str, Any], max_seq_len: int) -> Sample:
    """Return the sample of a record of text or messages.

    Raises:
        TemplateError: The model's chat template cannot write the messages.
    """
    if "messages" in record:
        ids, labels = chat.encode(tokenizer, record["messages"], tools=record.get("tools"))
        return cut(ids, labels, max_seq_len)
    ids = encode_text(tokenizer, record["text"], max_seq_len)
    return cut(ids, ids, max_seq_len)


class _Checker:
    """Refuses records that would stop the run when their turn comes."""

    def __init__(
        self, tokenizer: Callable[[], Tokenizer], max_seq_len: int, vocab_size: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len
        self._vocab_size = vocab_size

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Return if ``record`` can be tokenised; only what may fail is tried."""
        if "input_ids" in record:
            return
        if self._vocab_size is not None and self._largest_id >= self._vocab_size:
            sample = tokenise(self._tokenizer(), record, self._max_seq_len)
            self._check_ids(sample, self._vocab_size)
        elif "messages" in record:
            chat.render(self._tokenizer(), record["messages"], tools=record.get("tools"))

    @cached_property
    def _largest_id(self) -> int:
        return max(self._tokenizer().get_vocab().values(), default=-1)

    def _check_ids(self, sample: Sample, vocab_size: int) -> None:
        largest = max(sample.input_ids, default=-1)
        if largest >= vocab_size:
            token = next(t for t, i in self._tokenizer().get_vocab().items() if i == largest)
            raise ValueError(
                f"the tokenizer writes {token!r} as {largest}, but the model's vocabulary is 0 to "
                f"{vocab_size - 1}: give the model a larger embedding, or its own tokenizer"
            )


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
    tokenizer = cache(tokenizer)
    records = jsonl.scan(
        path,
        vocab_size=vocab_size,
        skip_bad_lines=skip_bad_lines,
        check_more=_Checker(tokenizer, max_seq_len, vocab_size),
    )
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
    except Exception as error:  # what is read there may make it raise anything
        raise RefusedError(
            f"the model has no usable tokenizer, which text and messages need: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    return tokenizer


def tokenizer_from_files(files: Mapping[str, bytes]) -> Tokenizer:
    """Return the tokenizer made of ``files`` (name to content), as a store carries them."""
    with as_folder(files) as folder:
        return load_tokenizer(folder)
