"""The record of what works with what: the table of docs/concepts/composition.md, which has the refusals and no others.

With `DLO_UPDATE_COMPOSITION=1` what is found is written there; a new row that works everywhere changes nothing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from composition import matrix

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "composition.md"
BEGIN, END = "<!-- the tables: written by tests/composition -->\n", "<!-- end of the tables -->\n"

#: Cases of a callback's test; those of other strategies than ZeRO 3 are slow.
every_strategy = pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.slow] * (name != "zero3")) for name in matrix.STRATEGIES]
)

#: By task, strategy and row: `works`, or the rule that refuses it, with what to use.
Table = dict[str, dict[str, dict[str, str]]]


def check_cells(
    task: str, strategy: str, rows: list[str], folder: Path, alone: dict[str, dict[str, matrix.Found]]
) -> dict[str, str]:
    """Runs cells of a column, compares them with the page, and returns them."""
    found = matrix.outcomes(task, strategy, rows, folder, alone)
    found = {name: outcome if outcome == "works" else _reason(name, outcome) for name, outcome in found.items()}
    table = known()
    if os.environ.get("DLO_UPDATE_COMPOSITION"):
        table[task][strategy] |= found
        PAGE.write_text(page_of(table))
    assert found == {name: table[task][strategy][name] for name in rows}, "run again with DLO_UPDATE_COMPOSITION=1"
    return found


def check_callback(name: str, strategy: str, folder: Path) -> None:
    """Compares a registered callback under a strategy with one process, for each task."""
    matrix.prepare(folder)
    for task in matrix.BESIDE[name].tasks:
        check_cells(task, strategy, [name], folder, {})


def known() -> Table:
    """Returns what the page says of all rows that there are."""
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| (.+) \|$", PAGE.read_text().split(BEGIN)[1].split(END)[0], re.MULTILINE)
    table: Table = {
        task: {strategy: dict.fromkeys(matrix.beside(task), "works") for strategy in matrix.STRATEGIES}
        for task in matrix.TASKS
    }
    refused = [
        (name, only, strategy, reason)
        for what, under, reason in rows
        for name, only in re.findall(r"`([^`]+)`(?: with `(\w+)`)?", what)
        for strategy in matrix.STRATEGIES
        if (_plain(strategy) in under.removeprefix("all but ").split(", ")) != under.startswith("all but ")
    ]
    for name, only, strategy, reason in refused:
        for task in [only] if only else matrix.TASKS:
            if name in table[task][strategy]:
                table[task][strategy][name] = reason
    for name, _, strategy, reason in refused:  # After the rows: nothing works with a task that is refused itself.
        if name in table:
            table[name][strategy] = dict.fromkeys(table[name][strategy], reason)
    return table


def page_of(table: Table) -> str:
    """Returns the page with a table: what works with every strategy, and the refusals, each reason once."""
    refused: dict[str, dict[str, list[str]]] = {}  # By row and reason: the strategies.
    for task, columns in table.items():
        for strategy, column in columns.items():
            if _is_refused(column):
                refused.setdefault(f"`{task}`", {}).setdefault(column[""], []).append(strategy)
                continue
            for name, outcome in column.items():
                if outcome != "works":
                    others = [of[strategy] for of in table.values() if not _is_refused(of[strategy])]
                    only = any(other.get(name, outcome) != outcome for other in others)
                    label = f"`{name}` with `{task}`" if only else f"`{name}`"
                    strategies = refused.setdefault(label, {}).setdefault(outcome, [])
                    strategies += [] if strategy in strategies else [strategy]
    rows: dict[tuple[str, str], list[str]] = {}
    for label, reasons in refused.items():
        for reason, strategies in reasons.items():
            rows.setdefault((_name(strategies), reason), []).append(label)
    options = ", ".join(f"`{name}`" for name in matrix.OPTIONS if f"`{name}`" not in refused)
    lines = [
        f"With every strategy: all callbacks that the table does not have, and {options}.",
        *("", "| what | refused under | rule, and what to use |", "|---|---|---|"),
        *(f"| {', '.join(what)} | {under} | {reason} |" for (under, reason), what in rows.items()),
    ]
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}"


def _is_refused(column: dict[str, str]) -> bool:
    """Returns whether the task itself is refused."""
    return len(set(column.values())) == 1 and column[""] != "works"


def _plain(strategy: str) -> str:
    return strategy.replace(",", "")


def _name(strategies: list[str]) -> str:
    """Returns the strategies in the order of the columns, or those that are left where most are named."""
    named = [_plain(strategy) for strategy in matrix.STRATEGIES if strategy in strategies]
    others = [_plain(strategy) for strategy in matrix.STRATEGIES if strategy not in strategies]
    return "all but " + ", ".join(others) if len(others) <= 3 else ", ".join(named)


def _reason(name: str, outcome: str) -> str:
    """Returns a refusal's rule and fix, without the row's name and the value that was given."""
    text = outcome.removeprefix("refused: ").removeprefix(f"{name.partition(',')[0]}: ")
    text = re.sub(r"\w+ (is not an option of|does not support) [\w ]+: ", "", text)
    return re.sub(r", got .*?(?=; |$)", "", text)
