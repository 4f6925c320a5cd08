"""JSONL files as they are found in the wild, and data with nothing to learn in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.data import jsonl
from megatrain.data.batches import Batches
from megatrain.data.dataset import Dataset, open_dataset
from megatrain.data.order import Order
from tests.support.toy_tokenizer import toy_tokenizer
from tiering.errors import RefusedError

ROWS = [json.dumps({"text": f"row {i} é"}, ensure_ascii=False).encode() for i in range(4)]
MARK = b"\xef\xbb\xbf"

GOOD = {
    "mark_and_crlf": MARK + b"\r\n".join(ROWS) + b"\r\n",
    "blank_lines": b"\n\n  \n\t\r\n".join(ROWS) + b"\n \n",
    "no_newline_at_the_end": b"\n".join(ROWS),
    "huge_line": b"\n".join([ROWS[0], json.dumps({"text": "x " * 6_000_000}).encode(), *ROWS[2:]]),
    "joined_files_with_marks": MARK + b"\n".join(ROWS[:2]) + b"\n" + MARK + b"\n".join(ROWS[2:]),
    "line_separator_inside": b"\n".join([ROWS[0].replace(b"row", "r\u2028w".encode()), *ROWS[1:]]),
    "other_keys": b"\n".join(row[:-1] + b', "id": 3, "meta": {"a": [1]}}' for row in ROWS),
}

BAD = {
    "cut_short": (2, ROWS[2][:-4], "not JSON: Unterminated string starting at in column 10"),
    "two_objects": (2, ROWS[2] + b" " + ROWS[3], "more than one JSON value, from column 21"),
    "latin_1": (2, ROWS[2].replace("é".encode(), b"\xe9"), "not UTF-8: byte 0xe9"),
    "array": (0, b"[" + ROWS[0] + b"]", "expected a JSON object, found an array; the file looks"),
    "opened_array": (0, b"[", "not JSON: .*; the file looks like one JSON array: write one object"),
    "compressed": (0, b"\x1f\x8b\x08\x00", "not UTF-8: byte 0x8b; the file is compressed"),
    "number": (1, b"7", "expected a JSON object, found a number"),
    "null": (1, b"null", "expected a JSON object, found null"),
    "deep": (1, b"[" * 200_000, "nested too deeply"),
    "half_a_pair": (1, b'{"text": "\\ud83d"}', "text holds half of a surrogate pair"),
    "no_known_key": (1, b'{"prompt": "a", "answer": "b"}', "found only answer, prompt"),
    "empty_object": (1, b"{}", "expected one of text, messages, input_ids; found only an empty"),
    "two_kinds": (1, b'{"text": "a", "messages": []}', "found text and messages"),
    "text_is_no_string": (1, b'{"text": 3}', "text must be a string, found a number"),
    "no_messages": (1, b'{"messages": []}', "messages must be a list of at least one"),
    "no_role": (1, b'{"messages": [{"content": "a"}]}', r"messages\[0\] must be an object with"),
    "no_content": (1, b'{"messages": [{"role": "a", "content": 1}]}', r"messages\[0\].content"),
    "no_tokens": (1, b'{"input_ids": []}', "input_ids must be a list of at least one integer"),
    "true_is_no_token": (1, b'{"input_ids": [1, true]}', "input_ids must be a list of at least"),
    "negative": (1, b'{"input_ids": [1, -100]}', "input_ids holds -100; the vocabulary is 0 to 95"),
    "outside": (1, b'{"input_ids": [1, 96]}', "input_ids holds 96; the vocabulary is 0 to 95"),
    "label_outside": (1, b'{"input_ids": [1], "labels": [96]}', "labels holds 96; the vocabulary"),
    "lengths": (1, b'{"input_ids": [1, 2], "labels": [1]}', "2 input_ids but 1 labels"),
}


def write(path: Path, body: bytes) -> Path:
    path.write_bytes(body)
    return path


@pytest.mark.parametrize("kind", GOOD)
def test_every_record_is_counted_and_read(tmp_path: Path, kind: str):
    index = jsonl.scan(write(tmp_path / "TRAIN.JSONL", GOOD[kind]))
    with Dataset(index, max_seq_len=32, tokenizer=toy_tokenizer()) as samples:
        assert len(samples) == 4
        assert all(sample.targets for sample in samples)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_refused_with_file_line_and_reason(tmp_path: Path, kind: str):
    at, line, reason = BAD[kind]
    path = write(tmp_path / "train.jsonl", b"\n\n".join([*ROWS[:at], line, *ROWS[at + 1 :]]))
    with pytest.raises(RefusedError, match=rf"train\.jsonl:{2 * at + 1}: .*{reason}"):
        jsonl.scan(path, vocab_size=96)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}\n".encode("utf-16"), "looks like UTF-16: save it as UTF-8"),
        ("{}\n".encode("utf-16-le"), "looks like UTF-16: save it as UTF-8"),
        (b"PAR1\x15\x04\n\xff", "is Parquet: write it as JSONL"),
    ],
)
def test_another_kind_of_file_is_named(tmp_path: Path, content: bytes, reason: str):
    with pytest.raises(RefusedError, match=rf"train\.jsonl:1: .*; the file {reason}"):
        jsonl.scan(write(tmp_path / "train.jsonl", content))


def test_bad_lines_are_left_out_and_counted_when_asked(tmp_path: Path):
    lines = [ROWS[0], b"{", ROWS[1], b"nothing", ROWS[2]]
    index = jsonl.scan(write(tmp_path / "t.jsonl", b"\n".join(lines)), skip_bad_lines=True)
    assert (len(index), index.skipped) == (3, 2)
    assert list(index.lines) == [1, 3, 5]


@pytest.mark.parametrize("body", [b"", b"\n \r\n", MARK])
def test_a_file_without_records_is_refused(tmp_path: Path, body: bytes):
    with pytest.raises(RefusedError, match="holds no records"):
        jsonl.scan(write(tmp_path / "train.jsonl", body))


@pytest.mark.parametrize("name", ["gone.jsonl", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str):
    with pytest.raises(RefusedError, match=r"cannot read data file .*: (No such|Is a dir)"):
        jsonl.scan(tmp_path / name)


# Samples without labels

IDS = list(range(3, 43))
MASKED = {"input_ids": IDS, "labels": [-100] * 40}
SEVEN = {"input_ids": IDS, "labels": [-100] * 33 + IDS[33:]}


def batches(tmp_path: Path, rows: list[dict[str, list[int]]]) -> Batches:
    path = write(tmp_path / "train.jsonl", "\n".join(map(json.dumps, rows)).encode())
    samples = open_dataset(path, max_seq_len=64, tokenizer=toy_tokenizer, vocab_size=96)
    order = Order(size=len(samples), fingerprint=samples.fingerprint, shuffle=False)
    return Batches(samples, order, micro_batch=1, accumulate=2)


def test_a_masked_sample_adds_nothing_to_the_count(tmp_path: Path):
    window = batches(tmp_path, [MASKED, SEVEN]).window(0)
    assert (window.targets, window.unlabelled, window.samples) == (7, 1, 2)


def test_a_window_of_masked_samples_has_nothing_to_learn(tmp_path: Path):
    run = batches(tmp_path, [MASKED, MASKED, SEVEN, SEVEN])
    assert [run.window(cursor).targets for cursor in (0, 2)] == [0, 14]


def test_data_without_any_label_is_refused_with_count_and_cause(tmp_path: Path):
    reason = r"train\.jsonl: none of 4 samples has a label to learn from; every label is masked"
    with pytest.raises(RefusedError, match=reason):
        batches(tmp_path, [MASKED] * 4)


# Order


@pytest.mark.parametrize("stops", [[21], [16], [7, 30]])
def test_a_resumed_run_sees_every_sample_once_an_epoch_in_the_same_order(stops: list[int]):
    def run(cursor: int, steps: int) -> tuple[list[int], int]:
        order = Order(size=64, fingerprint="f", seed=3)  # made anew, as after a resume
        used: list[int] = []
        for _ in range(steps):
            indices, _ = order.window(cursor, 4)
            used += indices
            cursor += len(indices)
        return used, cursor

    whole, _ = run(0, 48)
    resumed: list[int] = []
    cursor = 0
    for steps in [b - a for a, b in zip([0, *stops], [*stops, 48], strict=True)]:
        part, cursor = run(cursor, steps)
        resumed += part
    epochs = [whole[i : i + 64] for i in (0, 64, 128)]
    assert resumed == whole
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
