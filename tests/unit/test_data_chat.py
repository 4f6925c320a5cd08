from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.data import chat
from megatrain.data.dataset import open_dataset
from tests.support.toy_tokenizer import CHATML, toy_tokenizer
from tiering.errors import RefusedError

TOKENIZER = toy_tokenizer()
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": " hello é "},
    {"role": "user", "content": "assistant\nbye"},
    {"role": "assistant", "content": "see you"},
]


def learned(tokenizer, messages) -> list[str]:
    """Return the runs of labelled tokens as text."""
    ids, labels = chat.encode(tokenizer, messages)
    runs: list[list[int]] = [[]]
    for token, label in zip(ids, labels, strict=True):
        if label == token:
            runs[-1].append(token)
        else:
            assert label == -100
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def test_only_the_assistants_turns_are_learned_to_their_end_mark():
    assert learned(TOKENIZER, CHAT) == [" hello é <|im_end|>\n", "see you<|im_end|>\n"]


def test_the_tokens_are_those_of_the_chat_template():
    expected = TOKENIZER.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert chat.encode(TOKENIZER, CHAT)[0] == expected


def test_without_an_answer_nothing_is_learned():
    assert learned(TOKENIZER, CHAT[:2]) == []


def test_a_prompt_that_ends_in_a_blank_still_has_its_answer_learned_whole():
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert learned(toy_tokenizer(template), CHAT[1:3]) == [" hello é \n"]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    template = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'] | upper }}"
    )
    with pytest.raises(chat.TemplateError, match=r"the turns up to messages\[2\] differently"):
        chat.encode(toy_tokenizer(template), CHAT)


def test_a_template_whose_prompt_is_not_how_answers_start_is_refused():
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    with pytest.raises(chat.TemplateError, match="cannot be told apart; give input_ids"):
        chat.encode(toy_tokenizer(template), CHAT)


def test_what_the_template_refuses_is_told_with_file_and_line(tmp_path: Path):
    template = "{{ raise_exception('roles must alternate') }}"
    path = tmp_path / "train.jsonl"
    path.write_text("\n" + json.dumps({"messages": CHAT}))
    with pytest.raises(RefusedError, match=r"train\.jsonl:2: .*refuses .*: roles must alternate"):
        open_dataset(path, max_seq_len=99, tokenizer=lambda: toy_tokenizer(template))


STRICT = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user must begin') }}{% endif %}"
    + CHATML
)
LATE = [{"messages": CHAT[1:]}] * 3 + [{"messages": CHAT[2:]}, {"messages": CHAT[1:]}]


def test_a_late_line_that_the_template_refuses_is_told_before_the_first_step(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in LATE))
    with pytest.raises(RefusedError, match=r"train\.jsonl:4: .*refuses .*: user must begin"):
        open_dataset(path, max_seq_len=99, tokenizer=lambda: toy_tokenizer(STRICT))
    samples = open_dataset(
        path, max_seq_len=99, tokenizer=lambda: toy_tokenizer(STRICT), skip_bad_lines=True
    )
    with samples:
        assert (len(samples), samples.records.skipped) == (4, 1)
        assert all(sample.targets for sample in samples)


def test_parts_that_a_template_prints_as_a_list_are_refused():
    parts = [{"type": "text", "text": "Hi"}]
    message = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Hello"}]
    with pytest.raises(chat.TemplateError, match=r"the parts of messages\[0\].content as a list"):
        chat.encode(toy_tokenizer(), message)
    joins = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] | map(attribute='text') | join }}"
    )
    chat.encode(toy_tokenizer(joins), [message[0]])


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(chat.TemplateError, match="has no chat template, which messages need"):
        chat.encode(toy_tokenizer(None), CHAT)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], [-100, -100, -100, -100]),
        ([(1, 3)], [-100, 11, 12, -100]),
        ([(0, 1), (2, 4)], [10, -100, 12, 13]),
        ([(0, 0), (1, 2)], [-100, 11, -100, -100]),
    ],
)
def test_labels_are_the_tokens_that_end_inside_a_span(spans, expected):
    assert chat.label([10, 11, 12, 13], [(0, 1), (1, 2), (2, 3), (3, 4)], spans) == expected


def test_tokens_that_share_a_character_are_learned_together():
    assert chat.label([1, 2, 3], [(0, 1), (0, 1), (1, 2)], [(0, 1)]) == [1, 2, -100]
