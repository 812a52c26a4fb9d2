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
#: Pages whose plans are of files in `examples`.
EXAMPLES = ("write/task.md", "write/plan.md")
PAGES = [path for path in DOCS.rglob("*.md") if "ParallelPlan(\n" in path.read_text()]
OTHERS = [path for path in PAGES if path.relative_to(DOCS).as_posix() not in EXAMPLES]


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_the_plan_of_a_page_is_one(page: Path) -> None:
    (code,) = re.findall(r"^plan = (ParallelPlan\(.+?^\))", page.read_text(), re.MULTILINE | re.DOTALL)
    assert isinstance(eval(code), ParallelPlan)


def example(name: str) -> Any:
    sys.path.insert(0, str(DOCS.parent / "examples"))
    return importlib.import_module(name)


def build() -> tuple[Any, Any]:
    module = example("own_data")
    return module.TumourClassifier(width=8), module.TumourData(batch_size=32)


def test_the_plan_of_an_own_task_trains_under_tp_and_pp_as_one_process() -> None:
    axes: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2, "micro_batches": 4}]
    assert_parity(build, [Case(partial(MeshStrategy, dp_shard=1, **one), name=str(one)) for one in axes], steps=2)


def test_the_own_transformer_trains_under_tp_as_one_process() -> None:
    """Its own test, which is slow, has pipelines too."""
    own = example("own_transformer_test")
    own.assert_parity(own.build, [own.on_mesh(tp=2, sequence_parallel=True)], world_size=2, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_one_axis", "test_two_axes", "test_four_axes"])
def test_the_own_transformer_s_test_passes(name: str) -> None:
    getattr(example("own_transformer_test"), name)()
