"""Who imports whom: no circles, layers that go one way, a picture that is as the tree is, and a page that names it."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "concepts" / "architecture.md"


@pytest.fixture(scope="module")
def graph() -> ModuleType:
    """The module that draws the picture, with the layers; imported as the site does."""
    docs = str(ROOT / "docs")
    sys.path.insert(0, docs)
    try:
        return importlib.import_module("pictures.imports")
    finally:
        sys.path.remove(docs)


def test_each_kind_of_import_is_told_apart(graph):
    source = (
        "import a.b\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from c import d\nelse:\n    import e\n"
        "class F:\n    import g\n    def f(self):\n        from h.i import j, k\n"
        "try:\n    from . import l\nexcept ImportError:\n    from ..m import n\n"
    )
    assert set(graph.imports(source, "p.q.r")) == {
        ("a.b", "module"),
        ("typing.TYPE_CHECKING", "module"),
        ("c.d", "types"),
        ("e", "module"),
        ("g", "module"),
        ("h.i.j", "function"),
        ("h.i.k", "function"),
        ("p.q.l", "module"),
        ("p.m.n", "module"),
    }
    assert set(graph.imports("from . import a\nfrom .b import c", "p.q", is_package=True)) == {
        ("p.q.a", "module"),
        ("p.q.b.c", "module"),
    }


def test_circles_are_found(graph):
    assert graph.cycles([("a", "b"), ("b", "c")]) == []
    assert graph.cycles([("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("e", "f"), ("f", "e")]) == [
        ["a", "b", "c"],
        ["e", "f"],
    ]


def test_the_whole_tree_is_read(graph):
    modules, edges = graph.modules(), graph.edges()
    assert {name.partition(".")[0] for name in modules} == {"dlo_framework", "dlo_plugins", "dlo_tasks"}
    assert ("dlo_plugins.strategies.mesh", "dlo_framework.mesh", "module") in edges
    assert ("dlo_framework.applier", "dlo_framework.plan", "types") in edges
    assert ("dlo_framework.cli.run", "dlo_framework.cli.lightning_cli", "function") in edges
    #: Of its 240 modules all but those that hold nothing import or are imported.
    assert len({end for edge in edges for end in edge[:2]}) > 0.9 * len(modules)


def test_no_module_imports_itself_in_a_circle(graph):
    """At import, and later: inside functions and for types too."""
    assert graph.cycles(edge[:2] for edge in graph.edges()) == []


def test_folders_import_down_the_layers(graph):
    up = {edge for edge in graph.edges() if graph.goes_up(edge)}
    assert {edge[:2] for edge in up if edge.kind == "module"} == set()
    assert {edge[:2] for edge in up} == set(graph.UPWARD)


def test_an_import_up_or_aside_is_seen(graph):
    edge = graph.Edge
    assert graph.goes_up(edge("dlo_framework.errors", "dlo_framework.plan", "module"))
    assert graph.goes_up(edge("dlo_framework.checkpoint.saving", "dlo_framework.data.loader", "module"))
    assert graph.goes_up(edge("dlo_plugins.zero.zero_engine", "dlo_plugins.fsdp.sharding", "module"))
    assert graph.goes_up(edge("dlo_plugins.fsdp.sharding", "dlo_plugins.zero.zero_engine", "module"))
    assert not graph.goes_up(edge("dlo_plugins.fsdp.row_shards", "dlo_plugins.sharding.optimizer_shards", "module"))
    assert not graph.goes_up(edge("dlo_framework.snapshot", "dlo_framework.resume", "module"))
    assert not graph.goes_up(edge("dlo_plugins.zero.zero_engine", "dlo_framework.errors", "module"))


def test_each_layer_names_what_there_is(graph):
    found = {graph.place_of(module) for module in graph.modules()}
    named = [(package, place) for package, layers in graph.LAYERS.items() for _, places in layers for place in places]
    assert sorted(named) == sorted(found)
    with pytest.raises(LookupError, match=r"LAYERS must name every folder of dlo_tasks, got none for new; add it"):
        graph.layer_of("dlo_tasks.new")


def test_packages_import_the_core_alone(graph):
    across = {(edge.source.partition(".")[0], edge.target.partition(".")[0]) for edge in graph.edges()}
    assert {pair for pair in across if pair[0] != pair[1]} == {
        ("dlo_plugins", "dlo_framework"),
        ("dlo_tasks", "dlo_framework"),
    }


def test_the_picture_is_as_the_tree_is(graph):
    assert graph.FILE.read_text() == graph.draw(), "draw it anew: python docs/pictures/imports.py"


def test_every_path_on_the_page_exists():
    named = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.py)`", PAGE.read_text())
    assert len(named) > 80
    folders = [ROOT, *(ROOT / name for name in ("dlo_framework", "plugins/dlo_plugins"))]
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def test_every_contract_on_the_page_stands_where_it_says():
    table = PAGE.read_text().partition("## Contracts")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (`.+?) \|", table, re.MULTILINE)
    assert len(rows) > 10
    for contract, where in rows:
        text = "\n".join((ROOT / path).read_text() for path in re.findall(r"`(.+?)`", where))
        names = re.findall(r"`(\w+)", contract)
        assert names
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_the_page_has_a_sentence_for_each_file(graph, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    hooks = importlib.import_module("hooks")
    for package, folder in graph.PACKAGES.items():
        text = hooks.file_tables(package)
        rows = re.findall(r"^    \| `(\w+\.py)` \| (.+) \|$", text, re.MULTILINE)
        files = [file for file in (ROOT / folder).rglob("*.py") if file.name != "__init__.py"]
        assert sorted(name for name, _ in rows) == sorted(file.name for file in files)
        sentences = [sentence for _, sentence in rows] + re.findall(r"/\"\n\n    (.+)\n", text)
        assert len(sentences) == len(list((ROOT / folder).rglob("*.py")))
        assert [sentence for sentence in sentences if not sentence.endswith((".", ".`"))] == []
