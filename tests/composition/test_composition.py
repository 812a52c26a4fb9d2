"""Every callback with every strategy and both tasks: it works as in one process, or is refused before the first step.

What is found has to be what docs/concepts/composition.md says; `DLO_UPDATE_COMPOSITION=1 pytest -n0 -m ""` of this file
writes it there. `DLO_UPDATE_COMPOSITION=missing` runs the cells of new rows alone.
"""

from __future__ import annotations

import json
import os
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
    """Returns the page with the tables of what is known."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + "\n" + "\n".join(_table(*item) for item in known().items()) + "\n" + END + after


def _table(task: str, columns: dict[str, dict[str, str]]) -> str:
    """Returns a task's table: a row for each thing beside, a column for each strategy, and the refusals below."""
    strategies = [strategy for strategy in matrix.STRATEGIES if strategy in columns]
    notes: list[str] = []

    def cell(outcome: str) -> str:
        if not outcome:
            return ""  # A row that has not run yet.
        if outcome == "works":
            return "✓"
        message = outcome.removeprefix("refused: ")
        if message not in notes:
            notes.append(message)
        return f"{notes.index(message) + 1}"

    rows = [
        f"| {name or 'nothing else'} | "
        + " | ".join(cell(columns[strategy].get(name, "")) for strategy in strategies)
        + " |"
        for name in matrix.beside(task)
    ]
    head = [f"### {task}", "", "| | " + " | ".join(strategies) + " |", "|---|" + ":-:|" * len(strategies)]
    listed = [f"{number}. {message}" for number, message in enumerate(notes, 1)]
    return "\n".join([*head, *rows, "", *listed, ""])
