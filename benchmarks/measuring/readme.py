"""Writes the performance table of benchmarks/README.md from the newest results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from measuring.catalogue import HEADLINES, Headline
from measuring.record import bar_in_words, number
from measuring.report import table_of
from measuring.results import Results, newest

BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"
HEADING = ["measured", "baseline (= 1)", "dlo", "peer", "bar"]
COMMANDS = "`python benchmarks/run.py` measures; `python benchmarks/run.py --readme` makes this table from the results."
NONE = "No results yet: `python benchmarks/run.py` measures, and `python benchmarks/run.py --readme` makes this table."


def performance(files: Iterable[tuple[Path, Results]]) -> str:
    """Returns the text between the two marks.

    Args:
        files: Results to show, each with its path.
    """
    parts = []
    for path, results in files:
        lines = [line for headline in HEADLINES if (line := _line(headline, results)) is not None]
        if lines:
            report = f"results/{path.stem}.md"
            where = f"{results['hardware']}, {results['date']}"
            source = f"{where}: medians. All results, with their spread, are in [{report}]({report})."
            parts += [source, table_of(HEADING, lines)]
    return "\n\n".join([*parts, COMMANDS]) if parts else NONE


def rewritten(readme: str, folder: Path) -> str:
    """Returns a page with the table of the newest results in a folder.

    Args:
        readme: Text of the page.
        folder: Folder of the results.

    Raises:
        ValueError: If the page does not have each mark exactly once.
    """
    counts = readme.count(BEGIN), readme.count(END)
    if counts != (1, 1):
        raise ValueError(
            f"README.md must have each of the marks {BEGIN} and {END} once, got {counts[0]} and {counts[1]}"
        )
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{performance(newest(folder))}\n\n{END}{after}"


def _line(headline: Headline, results: Results) -> list[str] | None:
    """Returns the cells of a headline's row, or None if it was not measured."""
    table = _table(headline, results)
    if table is None:
        return None
    rows = table["rows"]
    ours = rows[headline.ours]
    peer = next((name for name in headline.peers if name in rows), None)
    peer_cell = "" if peer is None else f"{peer}: {number(rows[peer]['median'])}"
    unit = f"{headline.unit or table['unit']}{' (higher is better)' if table['better'] == 'higher' else ''}"
    cost = next((note for note in table["notes"] if headline.cost and note.startswith(headline.cost)), "").rstrip(".")
    figure = f"**{number(ours['median'])}**{f' ({cost[0].lower()}{cost[1:]})' if cost else ''}"
    return [headline.what, unit, figure, peer_cell, bar_in_words(ours, table["better"])]


def stale(results: Results) -> list[str]:
    """Returns the headlines whose benchmark ran but has no such row."""
    ran = {run["name"] for run in results["runs"].values() if run["record"] and run["record"]["tables"]}
    return [f"{one.what} ({one.name})" for one in HEADLINES if one.name in ran and _table(one, results) is None]


def _table(headline: Headline, results: Results) -> Mapping[str, Any] | None:
    """Returns the first table that matches the headline's title and has its row."""
    for run in results["runs"].values():
        if run["name"] == headline.name and run["record"] is not None:
            for table in run["record"]["tables"]:
                if table["title"].startswith(headline.table) and headline.ours in table["rows"]:
                    return dict(table)
    return None
