"""Reading a class from its source, without importing it."""

import sys
from pathlib import Path

import pytest

from dlo_framework.registry.class_source import SourceNotFoundError, find_spec, plain, read_class, read_summary

FILES = {
    "ps_pkg/__init__.py": "raise RuntimeError('imported')\nfrom .inner import Thing as Renamed\nfrom .star import *\n",
    "ps_pkg/inner.py": '''
from __future__ import annotations
import ps_base
from ps_base import Base as B

class Thing(B):
    """Does a thing,
    over two lines. See :class:`~ps_pkg.Other` and ``x``.

    More.
    """

class Passing(ps_base.Base):
    """Passes on.

    Args:
        own: Its own.
    """

    def __init__(self, own: dict[str, int] | None = None, /, *, flag: "bool", **kwargs):
        super().__init__(fixed=1, **kwargs)

    class Nested:
        """Nested."""

class Handing(Thing):
    def __init__(self, own: int = 0, **options):
        super().__init__(own)
        self.other = ps_base.Base(fixed=1, **options)

class Keeping(Thing):
    def __init__(self, **options):
        self.options = options
''',
    "ps_pkg/star.py": '''
try:
    import nothing_here
except ImportError:
    class Fallback:
        """Falls back."""
''',
    "ps_base.py": '''
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

class Root(Generic[TypeVar("T")]):
    """Root.

    Args:
        width: How wide.
        fixed: Not for children.
    """
    def __init__(self, width: int, fixed: int = 2, rate=1e-3): ...

class Base(Root[int]):
    pass

class Loop(Loop): ...

@dataclass(frozen=True)
class Data:
    """A dataclass.

    Args:
        size: Its size.
    """
    shared: ClassVar[int] = 1
    size: int
    names: list[str] = field(default_factory=list)
''',
    "ps_space/inner/leaf.py": 'class Leaf:\n    """In a namespace."""\n',
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_reexport_is_followed_and_nothing_is_imported() -> None:
    source = read_class("ps_pkg:Renamed")
    assert (source.name, source.module, source.line) == ("Thing", "ps_pkg.inner", 6)
    assert source.path.endswith("ps_pkg/inner.py")
    assert not [name for name in sys.modules if name.startswith("ps_")]


def test_the_summary_is_the_first_paragraph_without_markup() -> None:
    assert read_summary("ps_pkg.inner:Thing") == "Does a thing, over two lines. See Other and x."
    assert read_summary("ps_pkg:Fallback") == "Falls back."
    assert read_summary("ps_pkg.inner:Passing.Nested") == "Nested."
    assert plain("`a` and :meth:`b.c`") == "a and b.c"


def test_parameters_are_inherited_with_their_docs() -> None:
    parameters = read_class("ps_pkg.inner:Thing").parameters
    assert [(p.name, p.type, p.default, p.doc) for p in parameters] == [
        ("width", "int", None, "How wide."),
        ("fixed", "int", "2", "Not for children."),
        ("rate", "", "0.001", ""),
    ]


def test_parameters_passed_on_are_the_bases_but_for_those_fixed() -> None:
    parameters = read_class("ps_pkg.inner:Passing").parameters
    assert [(p.name, p.type, p.default) for p in parameters] == [
        ("own", "dict[str, int] | None", "None"),
        ("flag", "bool", None),
        ("width", "int", None),
        ("rate", "", "0.001"),
    ]


def test_parameters_passed_to_another_class_are_that_class_s() -> None:
    handing, keeping = read_class("ps_pkg.inner:Handing"), read_class("ps_pkg.inner:Keeping")
    assert [(p.name, p.default) for p in handing.parameters] == [("own", "0"), ("width", None), ("rate", "0.001")]
    assert not handing.takes_any
    assert keeping.takes_any


def test_a_dataclass_has_its_fields() -> None:
    parameters = read_class("ps_base:Data").parameters
    assert [(p.name, p.default, p.doc) for p in parameters] == [("size", None, "Its size."), ("names", "list()", "")]


def test_namespace_and_mapped_packages_are_found() -> None:
    assert read_summary("ps_space.inner.leaf:Leaf") == "In a namespace."
    spec = find_spec("dlo_framework.configs")
    assert spec is not None
    assert spec.origin is not None


@pytest.mark.parametrize("target", ["ps_no:X", "ps_pkg.no:X", "ps_base:No", "ps_base:Data.No", "math:Pi"])
def test_what_is_missing_is_told(target: str) -> None:
    with pytest.raises(SourceNotFoundError):
        read_class(target)


def test_a_class_that_is_its_own_base_ends() -> None:
    assert read_class("ps_base:Loop").parameters == ()
