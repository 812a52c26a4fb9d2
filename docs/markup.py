"""The little reStructuredText that docstrings hold, as Markdown."""

from __future__ import annotations

import re

_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod):`~?([^`]+)`")
_RULE = re.compile(r"=+(?: +=+)+")


def to_markdown(text: str) -> str:
    """Returns a docstring with its roles as code and its simple tables as Markdown tables."""
    return _tables(_ROLE.sub(r"`\1`", text))


def _tables(text: str) -> str:
    """Replaces simple tables: three rules of ``==== ====``, a header between the first two."""
    done: list[str] = []
    lines = text.split("\n")
    while lines:
        line = lines.pop(0)
        if not _RULE.fullmatch(line.strip()):
            done.append(line)
            continue
        starts = [match.start() for match in re.finditer("=+", line)]
        indent = line[: starts[0]]
        header = lines.pop(0)
        assert _RULE.fullmatch(lines.pop(0).strip()), f"a table's header is followed by a rule: {header}"
        done += [_row(header, starts, indent), f"{indent}|{'---|' * len(starts)}"]
        while not _RULE.fullmatch(lines[0].strip()):
            done.append(_row(lines.pop(0), starts, indent))
        lines.pop(0)
    return "\n".join(done)


def _row(line: str, starts: list[int], indent: str) -> str:
    ends = [_end_of_cell(line, start) for start in starts[1:]]
    cells = [line[start:end].strip() for start, end in zip([starts[0], *ends], [*ends, None], strict=True)]
    return f"{indent}| {' | '.join(cells)} |"


def _end_of_cell(line: str, next_start: int) -> int:
    """Returns where a cell ends: before the next column, or after a word that reaches into it."""
    if line[next_start - 1 : next_start].strip():
        return line.index(" ", next_start)
    return next_start
