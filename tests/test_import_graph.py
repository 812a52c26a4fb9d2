"""Who imports whom: no circles, a picture that is as the tree is, and a page that names it."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "concepts" / "architecture.md"


@pytest.fixture(scope="module")
def graph() -> ModuleType:
    """The module that draws the picture; imported as the site does."""
    docs = str(ROOT / "docs")
    sys.path.insert(0, docs)
    try:
        return importlib.import_module("pictures.imports")
    finally:
        sys.path.remove(docs)


def test_no_module_imports_itself_in_a_circle(graph):
    """At import, and later: inside functions and for types too."""
    assert graph.cycles(edge[:2] for edge in graph.edges()) == []


def test_folders_import_in_one_direction(graph):
    assert graph.circles() == []


def test_the_picture_is_as_the_tree_is(graph):
    assert graph.FILE.read_text() == graph.draw(), "draw it again: python docs/pictures/imports.py"


def test_every_path_on_the_page_exists():
    named = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.py)`", PAGE.read_text())
    assert len(named) > 20
    folders = [ROOT, *(ROOT / name for name in ("dlo_framework", "plugins/dlo_plugins"))]
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
