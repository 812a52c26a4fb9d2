"""The plans on the pages: those of the reader's own files train under tp and under pp as one process does."""

from __future__ import annotations

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlo_framework import ParallelPlan
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.parallel.mesh.strategy import MeshStrategy

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: Pages whose plans are of files in `examples`; test_docs_own_transformer trains the second one.
EXAMPLES = ("write/task.md", "write/plan.md")
PAGES = [path for path in DOCS.rglob("*.md") if "ParallelPlan(\n" in path.read_text()]
OTHERS = [path for path in PAGES if path.relative_to(DOCS).as_posix() not in EXAMPLES]


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_the_plan_of_a_page_is_one(page: Path) -> None:
    (code,) = re.findall(r"^plan = (ParallelPlan\(.+?^\))", page.read_text(), re.MULTILINE | re.DOTALL)
    assert isinstance(eval(code), ParallelPlan)


def build() -> tuple[Any, Any]:
    sys.path.insert(0, str(DOCS.parent / "examples"))
    module = importlib.import_module("own_data")
    return module.TumourClassifier(width=8), module.TumourData(batch_size=32)


def test_the_plan_of_an_own_task_trains_under_tp_and_pp_as_one_process() -> None:
    axes: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2, "micro_batches": 4}]
    assert_parity(build, [Case(partial(MeshStrategy, dp_shard=1, **one), name=str(one)) for one in axes], steps=2)
