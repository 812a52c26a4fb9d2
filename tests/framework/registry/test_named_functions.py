"""Sets of functions that configs name: the package's own, a user's file's, and installed packages'."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlo_framework.errors import DloError
from dlo_framework.extensions import NamedFunctions
from dlo_framework.registry import Registry

GROUP = "nf_test.colours"
USER = """
from {module} import SET

@SET.register("olive")
def olive():
    return 3
"""


@pytest.fixture
def colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NamedFunctions]:
    """A set with one function, in a working directory of its own, which leaves no modules behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found: NamedFunctions = NamedFunctions("colour", GROUP)
    found.register("red")(red)
    yield found
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", None)):
            del sys.modules[name]


def red() -> int:
    return 1


def install(folder: Path, name: str, source: str) -> None:
    info = folder / "nf_pack-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nf_pack\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = nf_pack:{name}\n")
    (folder / "nf_pack.py").write_text(source)


def test_a_name_gives_its_function_and_an_unknown_one_the_nearest(colours):
    assert colours.get("red") is red
    with pytest.raises(DloError, match=re.escape("unknown colour 'ret'; did you mean 'red'? available: red")):
        colours.get("ret")
    with pytest.raises(DloError, match="unknown colour 'grey'; available: red"):
        colours.get("grey")


def test_options_of_register_make_the_value():
    found: NamedFunctions = NamedFunctions("colour", GROUP, make=lambda function, shade=0: (function(), shade))
    found.register("red", shade=7)(red)
    assert found.get("red") == (1, 7)
    with pytest.raises(DloError, match="colour blue must be registered with options among shade, got shades; did you"):
        found.register("blue", shades=7)
    with pytest.raises(DloError, match=r"among none, got overlaps; removed in 0\.2: a schedule runs its actions one"):
        NamedFunctions("schedule", GROUP).register("blue", overlaps=True)


def test_two_functions_of_one_name_are_refused_and_one_twice_is_not(colours):
    colours.register("red")(red)
    message = r"colour names must be unique, got 'red' in .*red and in .*install; rename one"
    with pytest.raises(DloError, match=message):
        colours.register("red")(install)


def test_an_installed_packages_function_is_imported_when_it_is_named(colours, tmp_path):
    install(tmp_path, "teal", "def teal():\n    return 2\n")
    assert colours.names() == ["red", "teal"]
    assert "nf_pack" not in sys.modules
    assert list(colours.loaded()) == ["red"]
    assert colours.get("teal")() == 2
    assert list(colours.loaded()) == ["red", "teal"]


def test_a_package_that_cannot_be_imported_is_named_with_the_cause(colours, tmp_path):
    install(tmp_path, "teal", "1 / 0")
    message = r"colour 'teal' \(nf_pack 1.2\) failed to import: ZeroDivisionError: division by zero"
    with pytest.raises(DloError, match=message):
        colours.get("teal")
    assert colours.get("red") is red


def test_a_users_file_may_register_functions_alone(colours, tmp_path):
    (tmp_path / "nf_home.py").write_text(
        f"from dlo_framework.extensions import NamedFunctions\nSET = NamedFunctions('colour', '{GROUP}')\n"
    )
    (tmp_path / "nf_user.py").write_text(USER.format(module="nf_home"))
    (tmp_path / "nf_empty.py").write_text("from nf_home import SET\n")
    registry = Registry()
    for _ in range(2):
        assert registry.load_user_module("./nf_user.py") == []
    assert sys.modules["nf_home"].SET.get("olive")() == 3
    with pytest.raises(DloError, match=r"'./nf_empty.py' must define a public subclass of one of .*, got none"):
        registry.load_user_module("./nf_empty.py")
