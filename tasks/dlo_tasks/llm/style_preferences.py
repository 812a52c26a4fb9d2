"""Makes preferences of Python's standard library: the same code with string literals in double or in single quotes.

They need no download and no judge, and the result can be counted in what a model writes: chosen answers have double
quotes, rejected ones single quotes.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dlo_tasks.llm.preference_records import Preference
from dlo_tasks.llm.records import read_text

#: Lines of a prompt and of an answer.
PROMPT_LINES, ANSWER_LINES = 6, 4
#: String literals that keep their meaning in other quotes: no prefix, no quotes and no backslashes inside.
_PLAIN = re.compile(r"""(?P<quote>["'])[^"'\\\n]+(?P=quote)""")


def style_preferences(
    files: Sequence[Path], on_bytes: Callable[[int], object] = lambda size: None, *, unpaired: bool = False
) -> Iterator[Preference]:
    """Yields the preferences of Python files: a few lines as the prompt, the next ones as the answers.

    Args:
        files: Python files in UTF-8.
        on_bytes: Callback for progress, called with each file's size.
        unpaired: Whether to yield each answer by itself.
    """
    for number, path in enumerate(files):
        text = read_text(path)
        on_bytes(path.stat().st_size)
        lines = text.splitlines(keepends=True)
        double, single = (with_quotes(text, quote).splitlines(keepends=True) for quote in "\"'")
        if not len(lines) == len(double) == len(single):  # Form feeds, which Python does not count as line ends.
            continue
        step = PROMPT_LINES + ANSWER_LINES
        for first in range(0, len(lines) - step + 1, step):
            cut, past = first + PROMPT_LINES, first + step
            prompt = "".join(lines[first:cut])
            chosen, rejected = ("".join(found[cut:past]) for found in (double, single))
            if chosen != rejected and prompt.strip():
                found = Preference("text", prompt, chosen, rejected, None, number, first + 1)
                yield from found.take_apart() if unpaired else (found,)


def with_quotes(text: str, quote: str) -> str:
    """Returns a Python source with its plain string literals in these quotes; unchanged if it cannot be parsed."""
    lines = text.splitlines(keepends=True)
    places: list[tuple[int, int, int]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.STRING and _PLAIN.fullmatch(token.string):
                places.append((token.start[0] - 1, token.start[1], token.end[1] - 1))
    except (tokenize.TokenError, SyntaxError):
        return text
    for row, first, last in reversed(places):
        line = lines[row]
        lines[row] = line[:first] + quote + line[first + 1 : last] + quote + line[last + 1 :]
    return "".join(lines)
