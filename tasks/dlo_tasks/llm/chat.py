"""Conversations: the text that a chat template makes of one, and which parts of it the assistant wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlo_framework.errors import DloError

Message = dict[str, Any]
#: Renders messages; the second argument adds the text that asks for an answer.
Render = Callable[[Sequence[Message], bool], str]

_GENERATION = re.compile(r"\{%-?\s*generation\b")
_MARK = "dloassistantcontentmark"


class NoSpans(ValueError):
    """A template's rendering does not tell which part of it the assistant wrote."""


def assistant_spans(render: Render, messages: Sequence[Message], special: Sequence[str]) -> tuple[str, list[range]]:
    """Returns a conversation's text, and the characters in it that the assistant wrote, from renderings alone.

    An answer begins where the rendering of all before it, with the request for an answer, ends. It ends where the
    rendering of all up to it ends. Templates that write the last answer in another way than earlier ones (Qwen3 leaves
    out earlier thoughts) fail that; for them the end is found from what follows the answer, which does not depend on
    it. Both are checked against the whole text, never assumed.

    Args:
        render: the template.
        messages: the conversation.
        special: the tokenizer's special tokens. Blanks after one that ends an answer are the template's, not the
            assistant's.

    Raises:
        NoSpans: if the renderings do not fit each other.
    """
    whole = render(messages, False)
    spans: list[range] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not number:
            raise NoSpans("it begins with the assistant")
        before = render(messages[:number], True)
        if not whole.startswith(before):
            raise NoSpans(f"the text before message {number + 1} is not the beginning of the whole")
        end = _end_of(render, messages, number, whole)
        if end < len(before):
            raise NoSpans(f"message {number + 1} ends before it begins")
        answer = whole[len(before) : end].rstrip()
        if special and answer.endswith(tuple(special)):
            end = len(before) + len(answer)
        spans.append(range(len(before), end))
    return whole, spans


def _end_of(render: Render, messages: Sequence[Message], number: int, whole: str) -> int:
    up_to = render(messages[: number + 1], False)
    if whole.startswith(up_to):
        return len(up_to)
    if isinstance(messages[number].get("content"), str):
        marked = [*messages[:number], messages[number] | {"content": _MARK}, *messages[number + 1 :]]
        _, found, after = render(marked, False).rpartition(_MARK)
        _, found_alone, closing = render(marked[: number + 1], False).rpartition(_MARK)
        if found and found_alone and after.startswith(closing) and whole.endswith(after):
            return len(whole) - len(after) + len(closing)
    raise NoSpans(f"where message {number + 1} ends does not follow from the template")


def encode_conversation(
    tokenizer: Any, messages: list[Message], tools: Any, where: str
) -> tuple[list[int], np.ndarray]:
    """Returns a conversation's token ids, and for each whether the assistant wrote it, bool [n].

    A template with ``{% generation %}`` says so itself; for others see :func:`assistant_spans`.

    Args:
        tokenizer: a fast one.
        messages: the conversation.
        tools: that the template is given, or None.
        where: the record's place, for messages.

    Raises:
        DloError: if there is no template, it refuses the conversation, or does not tell what the assistant wrote.
    """
    if _GENERATION.search(template_of(tokenizer, where)):
        out = _apply(
            tokenizer, messages, tools, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return out["input_ids"], np.array(out["assistant_masks"], dtype=bool)

    def render(some: Sequence[Message], ask: bool) -> str:
        return str(_apply(tokenizer, list(some), tools, where, tokenize=False, add_generation_prompt=ask))

    try:
        text, spans = assistant_spans(render, messages, tokenizer.all_special_tokens)
    except NoSpans as error:
        raise DloError(
            f"{where}: the chat template does not tell which tokens the assistant wrote ({error}); give a"
            " chat_template that encloses them in {% generation %} ... {% endgeneration %}"
        ) from None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    first = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
    learned = np.zeros(len(first), dtype=bool)
    for span in spans:
        learned |= (first >= span.start) & (first < span.stop)
    return encoded["input_ids"], learned


def encode_request(tokenizer: Any, messages: list[Message], tools: Any, where: str) -> list[int]:
    """Returns the token ids of a conversation with the text that asks for an answer."""
    template_of(tokenizer, where)
    out = _apply(tokenizer, messages, tools, where, tokenize=True, return_dict=True, add_generation_prompt=True)
    return list(out["input_ids"])


def template_of(tokenizer: Any, where: str) -> str:
    """Returns a tokenizer's chat template.

    Raises:
        DloError: if it has none.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise DloError(
            f"{where}: messages need a chat template, and the tokenizer has none; set chat_template to a file with one,"
            " use the tokenizer of a chat model, or give prompt and completion"
        )
    return str(template)


def _apply(tokenizer: Any, messages: list[Message], tools: Any, where: str, **options: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **options)
    except (TemplateError, TypeError, ValueError) as error:
        raise DloError(f"{where}: the chat template refuses the conversation: {error}; mend or remove it") from error
