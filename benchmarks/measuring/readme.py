"""The README's table of performance, made from the newest results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from measuring.catalogue import HEADLINES, Headline
from measuring.record import bar_in_words, number
from measuring.report import table_of
from measuring.results import Results, newest

BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"
HEADING = ["what", "1 is", "dlo", "peer", "bar"]
NONE = "No results yet: `python benchmarks/run.py` makes them, and `python benchmarks/run.py --readme` this table."


def performance(files: Iterable[tuple[Path, Results]]) -> str:
    """Returns the text between the two marks.

    Args:
        files: of results, each with its path.
    """
    parts = []
    for path, results in files:
        lines = [line for headline in HEADLINES if (line := _line(headline, results)) is not None]
        if lines:
            report = f"benchmarks/results/{path.stem}.md"
            where = f"{results['hardware']}, {results['date']}"
            told = f"{where}: medians; all of them, with their spread, in [{report}]({report})."
            parts += [told, table_of(HEADING, lines)]
    if not parts:
        return NONE
    made = (
        "`python benchmarks/run.py` measures, `python benchmarks/run.py --readme` makes this table of the newest file."
    )
    return "\n\n".join([*parts, made])


def rewritten(readme: str, folder: Path) -> str:
    """Returns the README with the table of the newest results in a folder.

    Raises:
        ValueError: if the two marks are not there.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"the README has each of the marks {BEGIN} and {END} once")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{performance(newest(folder))}\n\n{END}{after}"


def _line(headline: Headline, results: Results) -> list[str] | None:
    """Returns a line's cells; None if it was not measured."""
    table = _table(headline, results)
    if table is None:
        return None
    rows = table["rows"]
    ours = rows[headline.ours]
    peer = next((name for name in headline.peers if name in rows), None)
    beside = "" if peer is None else f"{peer}: {number(rows[peer]['median'])}"
    unit = f"{headline.unit or table['unit']}{' (higher is better)' if table['better'] == 'higher' else ''}"
    cost = next((note for note in table["notes"] if headline.cost and note.startswith(headline.cost)), "").rstrip(".")
    figure = f"**{number(ours['median'])}**{f' ({cost[0].lower()}{cost[1:]})' if cost else ''}"
    return [headline.what, unit, figure, beside, bar_in_words(ours, table["better"])]


def stale(results: Results) -> list[str]:
    """Returns what of the headlines was looked for in vain: their benchmarks ran, and have no such row."""
    ran = {run["name"] for run in results["runs"].values() if run["record"] and run["record"]["tables"]}
    return [f"{one.what} ({one.name})" for one in HEADLINES if one.name in ran and _table(one, results) is None]


def _table(headline: Headline, results: Results) -> Mapping[str, Any] | None:
    """Returns the first table that the headline is about and that has its row."""
    for run in results["runs"].values():
        if run["name"] == headline.name and run["record"] is not None:
            for table in run["record"]["tables"]:
                if table["title"].startswith(headline.table) and headline.ours in table["rows"]:
                    return dict(table)
    return None
