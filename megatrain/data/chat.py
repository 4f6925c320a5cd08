"""Conversations as tokens, with labels on the assistant's turns only.

Few chat templates mark the assistant's part. It is found from outside: what a template writes for
the turns before an answer, up to and including the generation prompt, must be how its text goes on
when the answer is there. The answer is the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatrain.data.jsonl import IGNORED

Message = Mapping[str, Any]
Span = tuple[int, int]  # characters, end excluded


class TemplateError(ValueError):
    """A conversation that the model's chat template cannot turn into labelled tokens."""


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    is_fast: bool
    chat_template: str | dict[str, str] | None

    def __call__(self, text: str, **options: Any) -> Any:
        """Return ``input_ids`` and, if asked, ``offset_mapping``."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return the conversation as text."""
        ...


def encode(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, tools: Any = None
) -> tuple[list[int], list[int]]:
    """Return the ids of a conversation, and labels that are -100 outside the assistant's turns.

    An answer reaches from behind its generation prompt to the end of its turn, end mark included.

    Raises:
        TemplateError: With a sentence for the user.
    """
    text, spans = render(tokenizer, messages, tools=tools)
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = tokens["input_ids"]
    return ids, label(ids, tokens["offset_mapping"], spans)


def render(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, tools: Any = None
) -> tuple[str, list[Span]]:
    """Return the text of a conversation, and where in it the assistant's turns are.

    Raises:
        TemplateError: With a sentence for the user.
    """
    if tokenizer.chat_template is None:
        raise TemplateError("the model's tokenizer has no chat template, which messages need")
    if not tokenizer.is_fast:
        raise TemplateError("messages need a fast tokenizer, which knows its tokens' places")
    text = _render(tokenizer, messages, tools)
    for turn, message in enumerate(messages):
        parts = message.get("content")
        if parts and isinstance(parts, list) and str(parts) in text:
            raise TemplateError(
                f"the chat template writes the parts of messages[{turn}].content as a list of"
                " Python; give content as a string"
            )
    return text, _answers(tokenizer, messages, text, tools)


def label(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Return the ids that end inside a span, and -100 for the others.

    The end decides, since byte-level tokenizers leave leading blanks out of a token's place.
    """
    labels = [IGNORED] * len(ids)
    remaining = iter(spans)
    span = next(remaining, None)
    for i, (_, end) in enumerate(offsets):
        while span and end > span[1]:
            span = next(remaining, None)
        if span and span[0] < end:
            labels[i] = ids[i]
    return labels


def _answers(
    tokenizer: ChatTokenizer, messages: Sequence[Message], text: str, tools: Any
) -> list[Span]:
    spans: list[Span] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:turn], tools, add_generation_prompt=True)
        after = _render(tokenizer, messages[: turn + 1], tools)
        if not after.startswith(before) or not text.startswith(after):
            raise TemplateError(
                f"the chat template writes the turns up to messages[{turn}] differently when the"
                " conversation goes on, so the answer's tokens cannot be told apart;"
                " give input_ids and labels instead"
            )
        spans.append((len(before), len(after)))
    return spans


def _render(
    tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Any, **options: Any
) -> str:
    from jinja2 import TemplateError as JinjaError

    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, **options
        )
    except (JinjaError, TypeError, KeyError, IndexError, ValueError) as error:
        raise TemplateError(f"the model's chat template refuses messages: {error}") from error
    return text
