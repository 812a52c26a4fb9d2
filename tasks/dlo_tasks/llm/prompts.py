"""Reads prompts to complete."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError
from dlo_tasks.llm.chat import encode_request
from dlo_tasks.llm.encode import encode_open
from dlo_tasks.llm.records import read_rows


def read_prompts(files: Sequence[Path], tokenizer: Any) -> tuple[list[Any], list[list[int]]]:
    """Returns the prompts of some files, as they stand there and as token ids.

    Args:
        files: ``.jsonl`` or ``.parquet`` with a ``prompt``, or with ``messages`` to answer, in each line or row; any
            other has a prompt a line.
        tokenizer: a fast one.

    Raises:
        DloError: for a line without a prompt, and a prompt without a token.
    """
    prompts: list[Any] = []
    places: list[str] = []
    for path in files:
        rows = read_rows(path)
        if rows is None:
            lines = path.read_text(encoding="utf-8").splitlines()
            rows = ((number, {"prompt": line}) for number, line in enumerate(lines, 1) if line.strip())
        for number, values in rows:
            prompt = values.get("prompt", values.get("messages"))
            places.append(f"{path}:{number}")
            if not isinstance(prompt, str | list) or not prompt:
                raise DloError(
                    f"{places[-1]}: a line needs a prompt (a text), or messages, but has"
                    f" {', '.join(map(repr, values)) or 'nothing'}"
                )
            prompts.append(prompt)
    ids: list[list[int]] = []
    for prompt, where in zip(prompts, places, strict=True):
        if isinstance(prompt, str):
            ids += encode_open(tokenizer, [prompt])
        else:
            ids.append(encode_request(tokenizer, prompt, None, where))
        if not ids[-1]:
            raise DloError(f"{where}: the prompt {prompt!r} has no token; write something to complete")
    if not prompts:
        raise DloError(f"there is no prompt in {', '.join(map(str, files))}; write one a line")
    return prompts, ids
