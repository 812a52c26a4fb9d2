"""Renders conversations with chat templates, and finds the assistant's tokens in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlo_framework.errors import DloError

Message = dict[str, Any]
#: Function that renders messages; its second argument adds the generation prompt.
Render = Callable[[Sequence[Message], bool], str]

_GENERATION = re.compile(r"\{%-?\s*generation\b")
_MARK = "dloassistantcontentmark"


class SpansNotFound(ValueError):
    """Raised if the spans of the assistant's answers cannot be derived from a template's renderings."""


def assistant_spans(render: Render, messages: Sequence[Message], special: Sequence[str]) -> tuple[str, list[range]]:
    """Returns a conversation's text and the spans of the assistant's answers in it, in characters.

    An answer begins at the end of the rendering of all messages before it, with the generation prompt. It ends at the
    end of the rendering of all messages up to it. Some templates render the last answer differently from earlier ones
    (Qwen3 omits earlier thoughts); for these the end is found from the text after the answer, which does not depend on
    the answer. Both are checked against the rendering of the full conversation.

    Args:
        render: Template, as a function.
        messages: Conversation.
        special: Special tokens of the tokenizer. Blanks after a special token that ends an answer belong to the
            template, not to the assistant.

    Raises:
        SpansNotFound: If the renderings do not match each other.
    """
    whole = render(messages, False)
    spans: list[range] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not number:
            raise SpansNotFound("the assistant's message is the first")
        before = render(messages[:number], True)
        if not whole.startswith(before):
            raise SpansNotFound(f"the text before message {number + 1} is not a prefix of the conversation's text")
        end = _end_of(render, messages, number, whole)
        if end < len(before):
            raise SpansNotFound(f"message {number + 1} ends before it begins")
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
    raise SpansNotFound(f"the end of message {number + 1} cannot be found")


def encode_conversation(
    tokenizer: Any, messages: list[Message], tools: Any, where: str
) -> tuple[list[int], np.ndarray]:
    """Returns a conversation's token ids, and whether each is the assistant's, bool [n].

    A template with ``{% generation %}`` marks the assistant's tokens; for others see :func:`assistant_spans`.

    Args:
        tokenizer: Fast tokenizer.
        messages: Conversation.
        tools: Tools for the template, or None.
        where: File and line of the record, for error messages.

    Raises:
        DloError: If the template is missing or refuses the conversation, or the assistant's tokens cannot be found.
    """
    if _GENERATION.search(find_chat_template(tokenizer, where)):
        out = _apply(
            tokenizer, messages, tools, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return out["input_ids"], np.array(out["assistant_masks"], dtype=bool)

    def render(some: Sequence[Message], ask: bool) -> str:
        return str(_apply(tokenizer, list(some), tools, where, tokenize=False, add_generation_prompt=ask))

    try:
        text, spans = assistant_spans(render, messages, tokenizer.all_special_tokens)
    except SpansNotFound as error:
        raise DloError(
            f"{where}: chat template does not show which tokens the assistant wrote ({error}); set chat_template to one"
            " that encloses them in {% generation %} ... {% endgeneration %}"
        ) from None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    first = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
    learned = np.zeros(len(first), dtype=bool)
    for span in spans:
        learned |= (first >= span.start) & (first < span.stop)
    return encoded["input_ids"], learned


def encode_request(tokenizer: Any, messages: list[Message], tools: Any, where: str) -> list[int]:
    """Returns the token ids of a conversation with the generation prompt."""
    find_chat_template(tokenizer, where)
    out = _apply(tokenizer, messages, tools, where, tokenize=True, return_dict=True, add_generation_prompt=True)
    return list(out["input_ids"])


def find_chat_template(tokenizer: Any, where: str) -> str:
    """Returns a tokenizer's chat template.

    Raises:
        DloError: If it has none.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise DloError(
            f"{where}: tokenizer must have a chat template for messages, got none; set chat_template to a file with"
            " one, use the tokenizer of a chat model, or write prompt and completion"
        )
    return str(template)


def _apply(tokenizer: Any, messages: list[Message], tools: Any, where: str, **options: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **options)
    except (TemplateError, TypeError, ValueError) as error:
        raise DloError(
            f"{where}: chat template refuses the conversation: {error}; correct or remove the record"
        ) from error
