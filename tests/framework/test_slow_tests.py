"""Slow tests: they have the time they need, and CONTRIBUTING says what there is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_slow_test_has_an_hour_unless_it_says_otherwise(request: pytest.FixtureRequest) -> None:
    plugins = request.config.pluginmanager.get_plugins()
    conftest = next(plugin for plugin in plugins if hasattr(plugin, "nothing_is_left_in_the_environment"))

    def made(*marks: pytest.MarkDecorator) -> pytest.Function:
        item: pytest.Function = pytest.Function.from_parent(request.node.parent, name="made", callobj=lambda: None)
        for mark in marks:
            item.add_marker(mark)
        return item

    items = [made(), made(pytest.mark.slow), made(pytest.mark.slow, pytest.mark.timeout(7200))]
    conftest.pytest_collection_modifyitems(items)
    markers = [item.get_closest_marker("timeout") for item in items]
    assert [marker and marker.args for marker in markers] == [None, (3600,), (7200,)]


def test_contributing_names_every_slow_test() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Slow tests")[2].partition("\n## ")[0]
    named = {ROOT / path for row in re.findall(r"^\| (`tests.+?) \|", table, re.MULTILINE) for path in paths(row)}
    slow = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.slow" in path.read_text()}
    assert len(slow) > 30
    assert {path for path in slow if not named & {path, *path.parents}} == set()
    assert {path for path in named if not any(path in (file, *file.parents) for file in slow)} == set()


def paths(row: str) -> list[str]:
    return re.findall(r"`(.+?)`", row)
