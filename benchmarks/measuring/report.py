"""Writes the Markdown report of a machine and a day from the records of its benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from measuring.record import bar_in_words, cells, reached
from measuring.results import Results

HOW = """Each benchmark runs by itself, beside its peers, in rounds in which all take turns in a random order; the first
warms up. A ratio is taken within its round. `median`, `min` and `max` are over the rounds; a row that ends in "again"
is the base measured twice: trust a difference that is larger than its own from 1. **Bold** is dlo."""


def markdown(results: Results, plots: Mapping[tuple[str, str], str]) -> str:
    """Returns the report.

    Args:
        results: Results of all benchmarks.
        plots: Paths of the plots, relative to the report's folder, by the run's key and the table's title.
    """
    parts = [f"# {results['hardware']}, {results['date']}", _versions(results), HOW]
    if results["quick"]:
        parts.append("**A quick run, which tries the machinery: its figures mean nothing.**")
    parts += [_bars(results), _times(results), _not_measured(results)]
    for key, run in results["runs"].items():
        parts.append(_benchmark(key, run, plots))
    return "\n\n".join(part for part in parts if part) + "\n"


def _versions(results: Results) -> str:
    found: dict[str, str] = {}
    for run in results["runs"].values():
        found |= (run["record"] or {}).get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _bars(results: Results) -> str:
    """Returns the number of bars met, and the list of bars missed."""
    rows = [
        (key, table, name, row)
        for key, run in results["runs"].items()
        for table in (run["record"] or {"tables": []})["tables"]
        for name, row in table["rows"].items()
        if "bar" in row
    ]
    missed = [(key, table, name, row) for key, table, name, row in rows if not reached(row, table["better"])]
    lines = [f"Bars met: {len(rows) - len(missed)} of {len(rows)}."]
    lines += [
        f"- missed: {name}, {table['title']} (`{key}`): {row['median']}, {bar_in_words(row, table['better'])}"
        for key, table, name, row in missed
    ]
    return "\n".join(lines) if rows else ""


def _times(results: Results) -> str:
    lines = []
    for key, run in results["runs"].items():
        state = "" if run["record"] is not None else "failed"
        lines.append([f"`{key}`", f"{run['seconds'] / 60:.1f}", f"{run['load']:.2f}", state])
    total = sum(run["seconds"] for run in results["runs"].values())
    lines.append(["all", f"{total / 60:.1f}", "", ""])
    return "## Runs\n\n" + table_of(["", "minutes", "load average at its start", ""], lines)


def _not_measured(results: Results) -> str:
    lines = []
    for key, run in results["runs"].items():
        if run["record"] is None:
            lines.append([f"`{key}`", "all of it", run["error"]])
        else:
            lines += [[f"`{key}`", item["what"], item["why"]] for item in run["record"]["not_measured"]]
    return "## Not measured\n\n" + table_of(["", "what", "why"], lines) if lines else ""


def _benchmark(key: str, run: Mapping[str, Any], plots: Mapping[tuple[str, str], str]) -> str:
    record = run["record"]
    if record is None or not record["tables"]:
        return ""
    parts = [f"## {key}", f"{record['question']} On {record['device']}."]
    for table in record["tables"]:
        parts.append(f"### {table['title']}\n\n1 is {table['unit']}; {table['clock']}; {table['better']} is better.")
        heading, *lines = cells(table)
        # What is dlo's stands out.
        bold = [
            [f"**{line[0]}**" if table["rows"][line[0]].get("ours") else line[0], *line[1:]] for line in lines
        ]  # fmt: skip
        parts.append(table_of(heading, bold))
        parts += table["notes"]
        if (key, table["title"]) in plots:
            parts.append(f"![{table['title']}]({plots[key, table['title']]})")
    return "\n\n".join(parts)


def table_of(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
