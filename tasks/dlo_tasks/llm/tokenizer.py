"""Loads tokenizers of transformers, and computes their fingerprints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError
from dlo_tasks.llm.hub_names import check_hub_name

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has files of a tokenizer."""
    return any((folder / name).is_file() for name in _FILES)


def require_transformers() -> None:
    """Raises DloError if transformers is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise DloError(f"TextData needs transformers ({error}); pip install 'dlo_framework[llm]'") from error


#: Template of a tokenizer that dlo trains itself: the role on a line of its own, then the text. The end-of-text token
#: ends the assistant's turns.
PLAIN_CHAT_TEMPLATE = """\
{%- if tools -%}
{{ raise_exception("it has no place for tools; set chat_template to a file with one that has") }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.tool_calls or message.function_call or message.reasoning_content or message.thinking -%}
{{ raise_exception("it has no place for tool calls or thoughts; set chat_template to a file with one that has") }}
{%- endif -%}
{{ message.role + ":\\n" }}
{%- if message.role == "assistant" -%}
{% generation %}{{ message.content + eos_token }}{% endgeneration %}{{ "\\n" }}
{%- else -%}
{{ message.content + "\\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "assistant:\\n" }}{% endif -%}
"""


def load_tokenizer(source: str, chat_template: str | None = None) -> Any:
    """Returns the fast tokenizer of a model; code that comes with it is never run.

    Args:
        source: Folder, or name on the Hugging Face hub.
        chat_template: File with a Jinja template that replaces the tokenizer's own.

    Raises:
        DloError: If the tokenizer is missing, or has no fast implementation.
    """
    require_transformers()
    from transformers import AutoTokenizer

    folder = Path(source).expanduser()
    if folder.is_dir() and not has_tokenizer(folder):
        raise DloError(
            f"tokenizer must be a folder with one of {', '.join(_FILES)}, got {folder}; save a tokenizer there with"
            " tokenizer.save_pretrained(folder), or set tokenizer to another folder or hub name"
        )
    if not folder.is_dir() and not source.startswith((".", "/", "~")):
        check_hub_name(source, "tokenizer", "tokenizer_config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else source, trust_remote_code=False)
    except Exception as error:  # Many types: damaged or missing files, a hub that cannot be reached.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DloError(
            f"the tokenizer {source!r} cannot be loaded: {reason[0]}; set tokenizer to a folder with tokenizer.json,"
            " or a hub name that can be reached"
        ) from error
    if not tokenizer.is_fast:
        raise DloError(
            f"tokenizer must be a fast one (tokenizer.json), which returns tokens' offsets in the text, got"
            f" {source!r}; convert it with transformers, or set another"
        )
    return set_chat_template(tokenizer, chat_template)


def set_chat_template(tokenizer: Any, chat_template: str | None) -> Any:
    """Returns the tokenizer with the chat template of a file; unchanged where ``chat_template`` is None.

    Raises:
        DloError: If the file does not exist.
    """
    if chat_template is not None:
        path = Path(chat_template).expanduser()
        if not path.is_file():
            raise DloError(
                f"chat_template must be a file with a Jinja template, got {chat_template}, which does not exist"
            )
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def fingerprint(tokenizer: Any) -> str:
    """Returns a SHA-256 of all settings that change a fast tokenizer's output."""
    parts = [
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(tokenizer.chat_template, sort_keys=True),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
    ]
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part.encode()).digest())
    return total.hexdigest()


def vocabulary_size(tokenizer: Any) -> int:
    """Returns a tokenizer's largest id plus one, which exceeds its number of tokens where ids have gaps."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def find_filler_id(tokenizer: Any) -> int:
    """Returns the id for unused positions: the padding token, else the end-of-text token, else 0."""
    found = [tokenizer.pad_token_id, tokenizer.eos_token_id, 0]
    return int(next(token for token in found if token is not None))
