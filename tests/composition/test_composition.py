"""Every callback with every strategy and both tasks: it works as in one process, or is refused before the first step.

What is found has to be what docs/concepts/composition.md says; `DLO_UPDATE_COMPOSITION=1 pytest -n0 -m ""` of this file
writes it there. `DLO_UPDATE_COMPOSITION=missing` runs the cells of new rows alone.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from composition import matrix
from dlo_framework.testing import run_distributed

DOCS = Path(__file__).resolve().parents[2] / "docs" / "concepts"
KNOWN, PAGE = DOCS / "composition.json", DOCS / "composition.md"
UPDATE = os.environ.get("DLO_UPDATE_COMPOSITION", "")
BEGIN, END = "<!-- the tables: written by tests/composition -->\n", "<!-- end of the tables -->\n"
#: Of one column in the ordinary tests: the machinery, and one that is refused. All columns take a quarter of an hour.
ORDINARY = ["", "accumulation, clipping", "DiLoCo", "GradientNoise", "WeightEMA"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("composition")
    matrix.prepare(home)
    return home


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, matrix.Found]]:
    """What one process does, by task and row; filled as they are asked for."""
    return {}


def known() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads(KNOWN.read_text()) if KNOWN.exists() else {}


def outcomes(
    task: str, strategy: str, names: list[str], folder: Path, alone: dict[str, dict[str, matrix.Found]]
) -> dict[str, str]:
    """Runs cells of a column, and returns what came of each; what one process does is kept in ``alone``."""
    own = alone.setdefault(task, {})
    wanted = ["" if name and not matrix.BESIDE[name].alone else name for name in names]
    if new := [name for name in dict.fromkeys(wanted) if name not in own]:
        (found,) = run_distributed(matrix.run_cells, 1, folder, task, "", new, backend=None, timeout=600)
        own.update(zip(new, found, strict=True))
    ranks = matrix.RANKS.get(strategy, 2)
    answers = run_distributed(matrix.run_cells, ranks, folder, task, strategy, names, backend=None, timeout=800)
    cells = zip(names, zip(*answers, strict=True), (own[name] for name in wanted), strict=True)
    found = {name: matrix.judge(name, list(cell), one) for name, cell, one in cells}
    broken = {name: text for name, text in found.items() if text.startswith("broken")}
    assert not broken
    return found


def test_it_is_as_the_table_says(folder: Path) -> None:
    found = outcomes("CausalLM", "zero3", ORDINARY, folder, {})
    assert found == {name: known()["CausalLM"]["zero3"][name] for name in ORDINARY}
    assert any(text.startswith("refused") for text in found.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", matrix.STRATEGIES)
@pytest.mark.parametrize("task", matrix.TASKS)
def test_a_strategy_with_everything(
    task: str, strategy: str, folder: Path, alone: dict[str, dict[str, matrix.Found]]
) -> None:
    rows, before = matrix.beside(task), known().get(task, {}).get(strategy, {})
    if UPDATE == "missing" and not (rows := [name for name in rows if name not in before]):
        return
    found = outcomes(task, strategy, rows, folder, alone)
    if UPDATE == "missing":
        found = {name: (before | found)[name] for name in matrix.beside(task)}
    if UPDATE:
        content = known()
        content.setdefault(task, {})[strategy] = found
        KNOWN.write_text(json.dumps(content, indent=1) + "\n")
        PAGE.write_text(_page(PAGE.read_text()))
    assert found == known()[task][strategy], "run again with DLO_UPDATE_COMPOSITION=1"


def test_the_page_shows_what_is_known() -> None:
    content = known()
    assert content.keys() == matrix.TASKS.keys()
    assert all(columns.keys() == matrix.STRATEGIES.keys() for columns in content.values())
    cells = [cell for columns in content.values() for column in columns.values() for cell in column.values()]
    assert all(cell == "works" or cell.startswith("refused: ") for cell in cells)
    assert PAGE.read_text() == _page(PAGE.read_text())


def _page(text: str) -> str:
    """Returns the page with what is known."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + "\n" + _summary(known()) + "\n" + END + after


def _summary(content: dict[str, dict[str, dict[str, str]]]) -> str:
    """Returns a line of what works with every strategy, and a table of the refusals, each reason once."""
    refused: dict[str, dict[str, list[str]]] = {}  # By row and reason: the strategies.
    names = dict.fromkeys(name for columns in content.values() for column in columns.values() for name in column)
    for task, columns in content.items():
        for strategy, column in columns.items():
            if len(set(column.values())) == 1 and column[""] != "works":  # The task itself is refused.
                refused.setdefault(task, {}).setdefault(_reason("", column[""]), []).append(strategy)
                continue
            for name, outcome in column.items():
                if outcome != "works":
                    strategies = refused.setdefault(name, {}).setdefault(_reason(name, outcome), [])
                    strategies += [] if strategy in strategies else [strategy]
    rows: dict[tuple[str, str], list[str]] = {}
    for name, reasons in refused.items():
        for reason, strategies in reasons.items():
            rows.setdefault((_name(strategies), reason), []).append(f"`{name}`")
    works = ", ".join(f"`{name}`" for name in names if name and name not in refused)
    head = ["| what | refused under | rule, and what to use |", "|---|---|---|"]
    table = [f"| {', '.join(what)} | {under} | {reason} |" for (under, reason), what in rows.items()]
    return "\n".join([f"With every strategy: {works}.", "", *head, *table, ""])


def _name(strategies: list[str]) -> str:
    """Returns the strategies in the order of the columns, or those that are left where most are named."""
    named = [strategy.replace(",", "") for strategy in matrix.STRATEGIES if strategy in strategies]
    others = [strategy.replace(",", "") for strategy in matrix.STRATEGIES if strategy not in strategies]
    return "all but " + ", ".join(others) if len(others) <= 3 else ", ".join(named)


def _reason(name: str, outcome: str) -> str:
    """Returns a refusal's rule and fix, without the row's name and the value that was given."""
    text = outcome.removeprefix("refused: ").removeprefix(f"{name.partition(',')[0]}: ")
    text = re.sub(r"\w+ (is not an option of|does not support) [\w ]+: ", "", text)
    return re.sub(r", got .*?(?=; |$)", "", text)
