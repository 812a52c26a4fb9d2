"""Every callback with every strategy and both tasks: it works as in one process, or is refused before the first step.

What is found has to be what docs/concepts/composition.md says; `DLO_UPDATE_COMPOSITION=1 pytest -n0 -m ""` of this file
writes it there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from composition import matrix
from composition.page import PAGE, check_cells, known, page_of

#: Of one column in the ordinary tests: the machinery, and one that is refused. All columns take a quarter of an hour.
ORDINARY = ["", "DiLoCo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("composition")
    matrix.prepare(home)
    return home


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, matrix.Found]]:
    """What one process does, by task and row; filled as they are asked for."""
    return {}


def test_it_is_as_the_table_says(folder: Path) -> None:
    found = check_cells("CausalLM", "zero3", ORDINARY, folder, {})
    assert [name for name, outcome in found.items() if outcome != "works"] == ["DiLoCo"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", matrix.STRATEGIES)
@pytest.mark.parametrize("task", matrix.TASKS)
def test_a_strategy_with_everything(
    task: str, strategy: str, folder: Path, alone: dict[str, dict[str, matrix.Found]]
) -> None:
    check_cells(task, strategy, matrix.beside(task), folder, alone)


def test_the_page_is_as_it_was_written() -> None:
    assert PAGE.read_text() == page_of(known())
