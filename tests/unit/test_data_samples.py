from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.data import jsonl
from megatrain.data.batches import Batches, Tally, collate
from megatrain.data.dataset import (
    Dataset,
    Sample,
    encode_text,
    load_tokenizer,
    open_dataset,
    tokenizer_from_files,
)
from megatrain.data.order import Order
from tests.support.toy_tokenizer import toy_tokenizer
from tiering.errors import CorruptionError, RefusedError

TOKENIZER = toy_tokenizer()
END = TOKENIZER.eos_token_id


@pytest.fixture
def dataset(tmp_path: Path):
    def build(*records: dict[str, Any], max_seq_len: int = 64, tokenizer=TOKENIZER) -> Dataset:
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return open_dataset(path, max_seq_len=max_seq_len, tokenizer=lambda: tokenizer)

    return build


def test_text_is_learned_whole_with_its_end(dataset):
    (sample,) = dataset({"text": "abc"})
    assert sample.input_ids == [*TOKENIZER("abc")["input_ids"], END]
    assert sample.labels == sample.input_ids
    assert sample.targets == 3


def test_given_tokens_and_labels_are_taken_as_they_are(dataset):
    first, second = dataset({"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3, 4]})
    assert (first.input_ids, first.labels) == ([1, 2], [-100, 2])
    assert (second.input_ids, second.labels) == ([3, 4], [3, 4])


def test_a_first_label_is_no_target(dataset):
    assert [s.targets for s in dataset({"input_ids": [1, 2]}, {"input_ids": [1]})] == [1, 0]


def test_longer_samples_are_cut_and_say_so(dataset):
    long, short = dataset({"text": "abcdefgh"}, {"text": "abc"}, max_seq_len=4)
    assert (len(long.input_ids), len(long.labels), long.truncated) == (4, 4, True)
    assert (len(short.input_ids), short.truncated) == (4, False)


@pytest.mark.parametrize("text", ["x " * 4000, " " * 4000, "é" * 900, "ab"])
def test_a_text_that_is_cut_before_it_is_tokenised_has_the_same_tokens(text: str):
    whole = [*TOKENIZER(text)["input_ids"], END]
    assert encode_text(TOKENIZER, text, 20)[:20] == whole[:20]
    assert (len(encode_text(TOKENIZER, text, 20)) > 20) == (len(whole) > 20)


def test_an_end_that_the_tokenizer_adds_is_not_doubled():
    assert encode_text(TOKENIZER, "a<|im_end|>", 20)[-2:] == [*TOKENIZER("a")["input_ids"], END]


def test_text_without_a_tokenizer_is_refused_before_anything_else(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text('{"input_ids": [1, 2]}\n{"text": "a"}\n')
    with pytest.raises(RefusedError, match="no usable tokenizer, which text and messages need"):
        open_dataset(
            tmp_path / "train.jsonl", max_seq_len=8, tokenizer=lambda: load_tokenizer(tmp_path)
        )


def test_a_tokenizer_is_made_from_the_files_a_store_carries(tmp_path: Path):
    TOKENIZER.save_pretrained(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again = tokenizer_from_files(files)
    assert again("abc")["input_ids"] == TOKENIZER("abc")["input_ids"]
    assert again.chat_template == TOKENIZER.chat_template


TOKENIZERS = {
    "nothing": b"",
    "no tokenizer": b"{}",
    "a list": b"[]",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
}


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizer_files_of_any_content_are_read_or_refused(tmp_path: Path, kind: str, file: str):
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / file).write_bytes(TOKENIZERS[kind])
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with suppress(RefusedError):
        tokenizer_from_files(files)


@pytest.mark.parametrize("record", [{"text": "ab"}, {"messages": [{"role": "a", "content": "ab"}]}])
def test_a_token_that_the_model_has_no_row_for_is_named_before_the_first_step(
    tmp_path: Path, record: dict[str, Any]
):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "!!"}\n' + json.dumps(record))
    rows = TOKENIZER("a")["input_ids"][0] + 1
    silent = toy_tokenizer(None if "text" in record else "{{ messages[0]['content'] }}")
    silent.eos_token = None
    with pytest.raises(RefusedError, match=rf":2: .* writes 'b' as {rows}, .* is 0 to {rows - 1}"):
        open_dataset(path, max_seq_len=9, tokenizer=lambda: silent, vocab_size=rows)
    with open_dataset(
        path, max_seq_len=9, tokenizer=lambda: silent, vocab_size=rows + 1
    ) as samples:
        assert len(samples) == 2


def test_a_file_that_changes_during_the_run_is_noticed(dataset):
    samples = dataset({"text": "abc"}, {"text": "def"})
    path = samples.records.path
    path.write_text(path.read_text().replace("def", "xyz"))
    assert samples[0].targets == 3
    with pytest.raises(CorruptionError, match=r"train\.jsonl:2: the file has changed since"):
        samples[1]


def test_samples_that_lose_every_label_to_the_cut_are_refused_with_the_cause(dataset):
    record = {"input_ids": list(range(9)), "labels": [-100] * 8 + [8]}
    with pytest.raises(RefusedError, match=r"none of 2 samples .* data.max_seq_len=4 .*: raise"):
        dataset(record, record, max_seq_len=4)


def test_the_fingerprint_is_that_of_the_content(dataset, tmp_path: Path):
    first = dataset({"text": "abc"}).fingerprint
    assert dataset({"text": "abd"}).fingerprint != first
    assert dataset({"text": "abc"}).fingerprint == first


# Micro-batches


def sample(length: int, *, labels: list[int] | None = None) -> Sample:
    ids = list(range(1, length + 1))
    return Sample(input_ids=ids, labels=labels or ids)


def test_targets_are_the_labels_of_the_next_position():
    batch = collate([sample(3), sample(4, labels=[-100, -100, 3, 4])])
    assert batch.input_ids.tolist() == [[1, 2, 3, 0], [1, 2, 3, 4]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.targets.tolist() == [[2, 3, -100, -100], [-100, 3, 4, -100]]
    assert {t.dtype for t in (batch.input_ids, batch.attention_mask, batch.targets)} == {
        torch.int64
    }


def test_without_padding_there_is_no_mask():
    assert collate([sample(3), sample(3)]).attention_mask is None


def test_a_sample_of_one_token_is_padded_like_any_other():
    assert collate([sample(1), sample(2)]).targets.tolist() == [[-100, -100], [2, -100]]


def batches(samples: list[Sample], micro_batch: int, accumulate: int) -> Batches:
    order = Order(size=len(samples), fingerprint="f", shuffle=False)
    return Batches(samples, order, micro_batch=micro_batch, accumulate=accumulate)


def test_a_sample_without_tokens_is_padding_that_attention_can_see():
    empty = Sample(input_ids=[], labels=[])
    for batch, width in ((collate([empty]), 1), (collate([sample(3), empty]), 3)):
        mask = batch.attention_mask
        assert mask is None or mask.sum(1).tolist() == [3, 1]
        assert batch.input_ids.shape[1] == width
        assert batch.targets[-1].tolist() == [-100] * width


def test_a_window_counts_what_is_in_it():
    samples = [sample(3), sample(5), sample(2, labels=[-100, -100])]
    window = batches(samples, 2, 2).window(0)
    assert [len(batch.input_ids) for batch in window.micro_batches] == [2, 1]
    assert (window.samples, window.tokens, window.targets, window.unlabelled) == (3, 10, 6, 1)
    assert (window.indices, window.epoch, window.cursor) == ((0, 1, 2), 0, 3)


def test_the_last_window_of_an_epoch_takes_what_is_left():
    run = batches([sample(n) for n in (3, 60, 5, 17, 40)], 1, 4)
    assert run.steps_per_epoch == 2
    tail = run.window(4)
    assert (tail.samples, tail.targets, tail.cursor) == (1, 39, 5)
    assert run.window(5).indices == (0, 1, 2, 3)


def test_another_split_of_the_same_window_has_the_same_samples():
    samples = [sample(n) for n in (3, 60, 5, 17)]
    one, four = batches(samples, 1, 4).window(0), batches(samples, 4, 1).window(0)
    assert (one.indices, one.targets, one.tokens) == (four.indices, four.targets, four.tokens)


def test_a_window_with_nothing_to_learn_has_no_targets():
    masked = sample(4, labels=[-100] * 4)
    assert batches([masked, masked, sample(4)], 1, 2).window(0).targets == 0


def test_odd_samples_are_reported_once_for_an_epoch(caplog: pytest.LogCaptureFixture):
    tally = Tally()
    run = batches([sample(4, labels=[-100] * 4), sample(4), sample(4)], 1, 2)
    with caplog.at_level(logging.WARNING):
        for cursor in (0, 2):
            tally.add(run.window(cursor))
        tally.report(0)
    assert caplog.messages == [
        "epoch 0: of 3 samples 0 were cut to data.max_seq_len, 1 had no label"
    ]


def test_an_index_needs_few_bytes_a_record(dataset):
    index = dataset({"text": "a"}, {"text": "b"}).records
    arrays = (index.offsets, index.lengths, index.lines, index.checksums)
    assert sum(array.itemsize for array in arrays) == 28
    assert jsonl.KINDS == ("text", "messages", "input_ids")
