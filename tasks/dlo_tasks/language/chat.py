"""Conversations: rendered by chat templates, with the assistant's tokens; and prompts that a model completes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.errors import DloError
from dlo_tasks.language.records import check_conversation, check_text, read_rows, read_text

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


def encode_without_end(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Returns each text's token ids, with tokens that the tokenizer prepends, without the end-of-text token."""
    if not texts:
        return []
    end = tokenizer.eos_token_id
    rows = tokenizer(texts, verbose=False)["input_ids"]
    return [ids[:-1] if ids and end is not None and ids[-1] == end else ids for ids in rows]


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


# --- prompts ------------------------------------------------------------------------------------------------------


def read_prompts(
    files: Sequence[Path], tokenizer: Any, columns: Mapping[str, str] | None = None
) -> tuple[list[Any], list[list[int]]]:
    """Returns the prompts of some files, as texts or messages, and as token ids.

    Args:
        files: Files to read: ``.jsonl`` or ``.parquet`` with a ``prompt``, or with ``messages`` and optional ``tools``,
            in each line or row; any other file has one prompt per line.
        tokenizer: Fast tokenizer.
        columns: Other names of the columns; see :func:`dlo_tasks.language.records.read_records`.

    Raises:
        DloError: If a line has no prompt, a prompt has no token, or a file cannot be read.
    """
    prompts: list[Any] = []
    ids: list[list[int]] = []
    for path in files:
        for number, values in _rows(path):
            where = f"{path}:{number}"
            prompt, row = _prompt(values, columns or {}, tokenizer, where)
            if not row:
                raise DloError(
                    f"{where}: prompt must have at least one token, got {prompt!r}; write at least one character"
                )
            prompts.append(prompt)
            ids.append(row)
    if not prompts:
        raise DloError(
            f"predict_files must have at least one prompt, got none in {', '.join(map(str, files))}; write one per line"
        )
    return prompts, ids


def encode_prompts(tokenizer: Any, prompts: Sequence[str | list[dict[str, Any]]]) -> list[list[int]]:
    """Returns the token ids of prompts: texts as they are, conversations with the chat template's generation prompt.

    Raises:
        DloError: If a prompt has no token, or a conversation cannot be rendered.
    """
    rows: list[list[int]] = []
    for number, prompt in enumerate(prompts, 1):
        where = f"prompts, number {number}"
        if isinstance(prompt, str):
            rows += encode_without_end(tokenizer, [prompt])
        else:
            rows.append(encode_request(tokenizer, *check_conversation(prompt, None, where), where))
        if not rows[-1]:
            raise DloError(f"prompts must have at least one token each, got {prompt!r}; write at least one character")
    return rows


def format_prompt(prompt: str | list[dict[str, Any]]) -> str:
    """Returns a prompt as a text to show: of a conversation a line for each message, and the role of the answer."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join([*(f"{turn['role']}: {turn.get('content') or ''}" for turn in prompt), "assistant: "])


def warn_of_plain_prompts(option: str, prompts: Sequence[Any]) -> None:
    """Warns of prompts without the chat template that all training records have.

    Args:
        option: Option with the prompts.
        prompts: Texts or conversations.
    """
    if any(isinstance(prompt, str) for prompt in prompts):
        rank_zero_warn(
            f"{option} has plain texts, and the training records are conversations: the texts are completed without the"
            " chat template; write [{role: user, content: ...}] in place of a text, in files under the key messages"
        )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields a file's numbered rows; for plain text its lines, split at line ends only."""
    rows = read_rows(path)
    if rows is not None:
        yield from rows
        return
    lines = read_text(path).split("\n")
    yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _prompt(
    values: dict[str, Any] | str, columns: Mapping[str, str], tokenizer: Any, where: str
) -> tuple[Any, list[int]]:
    """Returns a row's prompt, as text or messages, and as token ids."""
    if isinstance(values, str):
        return values, encode_without_end(tokenizer, [values])[0]
    wanted, of_messages, of_tools = (columns.get(name, name) for name in ("prompt", "messages", "tools"))
    prompt = values.get(wanted)
    if isinstance(prompt, str) and prompt:
        text = check_text(prompt, wanted, where)
        return text, encode_without_end(tokenizer, [text])[0]
    asked = prompt or values.get(of_messages)
    if not isinstance(asked, list) or not asked:
        raise DloError(
            f"{where}: record must have {wanted!r} (a string) or {of_messages!r}, got"
            f" {', '.join(map(repr, values)) or 'no keys'}; rename a key, or set columns, such as {{prompt: question}}"
        )
    messages, tools = check_conversation(asked, values.get(of_tools), where)
    return messages, encode_request(tokenizer, messages, tools, where)
