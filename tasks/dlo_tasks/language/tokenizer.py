"""Tokenizers: loads those of transformers, computes their fingerprints, and trains that of the default corpus.

The default corpus is the source files of Python's standard library. Every Python has these files, so a language model
can be trained without a download. The tokenizer is byte-level byte-pair encoding as in GPT-2 (Radford et al. 2019,
"Language Models are Unsupervised Multitask Learners"; BPE: Sennrich et al. 2016, arXiv:1508.07909), which can encode
any text.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sysconfig
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.errors import DloError, MissingInput, check_number, did_you_mean
from dlo_framework.lock import build_once
from dlo_tasks.language.records import content_hash, read_text
from dlo_tasks.language.token_cache import cached_file

#: Seconds to wait for a connection to the hub.
_TIMEOUT = 5.0


def check_hub_name(name: str, option: str, file: str) -> None:
    """Checks that a model of the hub is in the local cache, or that the hub can be reached.

    Args:
        name: Name of the model, `owner/name`; not that of an existing folder.
        option: Option with the name, for the error.
        file: File of the model that is needed.

    Raises:
        DloError: If neither is so.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return
    host = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        raise _not_here(name, option, "HF_HUB_OFFLINE is set")
    if urllib.request.getproxies():
        return  # A proxy connects to the hub.
    try:
        port = host.port or (80 if host.scheme == "http" else 443)
        socket.create_connection((host.hostname or "", port), timeout=_TIMEOUT).close()
    except OSError as error:
        why = f"{constants.ENDPOINT} cannot be reached ({error.strerror or error})"
        raise _not_here(name, option, why) from error


def _not_here(name: str, option: str, why: str) -> MissingInput:
    folder = Path(name).expanduser()
    near = folder.parent.iterdir() if folder.parent.is_dir() else ()
    hint = did_you_mean(folder.name, [path.name for path in near if path.is_dir()])
    return MissingInput(
        f"{option} must be a folder, or a model of the Hugging Face hub, got {name}: no such folder in {Path.cwd()},"
        f" it is not in the hub's cache, and {why}{hint or '; set the path of a folder, or connect to the hub'}",
        f"{option} {name}",
    )


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type name without a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
        raise MissingInput(
            f"the tokenizer {source!r} cannot be loaded: {first_line(error)}; set tokenizer to a folder with"
            " tokenizer.json, or a hub name that can be reached",
            f"tokenizer {source}",
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
    candidates = [tokenizer.pad_token_id, tokenizer.eos_token_id, 0]
    return int(next(token for token in candidates if token is not None))


# --- the default corpus -------------------------------------------------------------------------------------------

#: End-of-text token, and padding token.
END, PADDING = "<|endoftext|>", "<|padding|>"
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_FORMAT = 1
_SMALLEST = 256 + 2  # the bytes and the two tokens above


def standard_library(max_bytes: int, root: Path | None = None) -> list[Path]:
    """Returns source files of the standard library, without tests and installed packages, sorted by name.

    If they exceed ``max_bytes`` together, files are left out at regular intervals, so that all parts of the library
    are represented.

    Args:
        max_bytes: Maximum size of all files, in bytes.
        root: Folder of the library; None for this Python's.

    Raises:
        DloError: If this Python comes without its sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = sorted(_sources(root))
    sizes = [path.stat().st_size for path in files]
    part = min(1.0, max_bytes / max(1, sum(sizes)))
    kept: list[Path] = []
    seen = taken = 0
    for path, size in zip(files, sizes, strict=True):
        seen += size
        if taken + size <= seen * part and _is_text(path):
            kept.append(path)
            taken += size
    if not kept:
        raise DloError(
            f"corpus_bytes must be large enough for a source file of Python's standard library, got {max_bytes} for"
            f" {root}; raise it, or set train_files"
        )
    return kept


def _sources(root: Path) -> Iterator[Path]:
    """Yields Python files; skips excluded folders, one of which may have a hundred thousand files."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _is_text(path: Path) -> bool:
    """Returns whether a file is UTF-8 and not empty; a few of the library's have older encodings."""
    try:
        return bool(path.read_bytes().decode())
    except (OSError, UnicodeDecodeError):
        return False


def embedded_tokenizer(files: Sequence[Path], vocab_size: int, folder: Path) -> Any:
    """Returns a byte-level BPE of ``files``, trained at first use and cached in ``folder``.

    Args:
        files: Text files, in UTF-8.
        vocab_size: Number of tokens, with the 256 bytes and two special tokens; fewer if the text has no more merges.
        folder: Folder of the cache.

    Returns:
        Tokenizer, a ``PreTrainedTokenizerFast`` of transformers with an end-of-text and a padding token.

    Raises:
        DloError: If the vocabulary is smaller than the bytes, or the folder cannot be written to.
    """
    check_number("vocab_size", vocab_size, f"at least {_SMALLEST} (256 bytes, two special tokens)", "raise it")
    require_transformers()
    path = folder / f"bpe-{vocab_size}-{_FORMAT}-{content_hash(files)[:24]}.json"
    if path.is_file():
        try:
            return _wrap(path)
        except Exception as error:  # tokenizers raises plain Exceptions; the cache can be rebuilt.
            rank_zero_warn(f"{path}: the trained tokenizer cannot be read ({error}); it is trained again")
        path.unlink(missing_ok=True)

    def build() -> None:
        text = _train(files, vocab_size)
        with cached_file(path, "the trained tokenizer") as partial:
            partial.write_text(text, encoding="utf-8")

    build_once(path, build, "training the tokenizer")
    return _wrap(path)


def _wrap(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END, pad_token=PADDING)


def _train(files: Sequence[Path], vocab_size: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(read_text, files), trainer, length=len(files))
    return str(tokenizer.to_str())
