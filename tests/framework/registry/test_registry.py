"""Discovery, loading, and what each broken plug-in says; functions that configs name."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlo_framework.errors import DloError
from dlo_framework.extensions import NamedFunctions
from dlo_framework.registry import Registry
from support import distributions
from support.distributions import CALLBACK

Install = Callable[..., None]


@pytest.fixture
def install(project: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution on the path: its entry points (group's last word -> lines) and modules."""
    monkeypatch.syspath_prepend(str(project))

    def write(dist: str, entries: dict[str, list[str]], *version: str, **modules: str) -> None:
        groups = {f"dlo_framework.plugins.{kind}": names for kind, names in entries.items()}
        distributions.install(project, dist, groups, *version, **modules)

    return write


def test_only_the_named_plugin_is_imported(install: Install) -> None:
    install(
        "pack",
        {"callback": ["GoodOne = rg_good:GoodOne", "BadOne = rg_bad:BadOne"]},
        rg_good=CALLBACK.format(name="GoodOne"),
        rg_bad="raise RuntimeError('boom')",
    )
    registry = Registry()
    assert {"GoodOne", "BadOne"} <= set(registry.names())
    assert "rg_good" not in sys.modules
    assert registry.get("GoodOne").summary == "Does GoodOne."
    assert "rg_good" not in sys.modules
    assert registry.load("GoodOne").__name__ == "GoodOne"
    assert "rg_bad" not in sys.modules


@pytest.mark.parametrize(
    ("entry", "source", "message"),
    [
        ("callback: foo", "raise RuntimeError('boom')", r"^plugin 'foo' \(pkg 1\.2\) failed to import: .*boom$"),
        ("callback: Thingy", CALLBACK.format(name="Thingie"), "has no class 'Thingy'; did you mean 'Thingie'"),
        (
            "task: Wrong",
            CALLBACK.format(name="Wrong"),
            "Wrong; register it in .* 'dlo_framework.plugins.callback'",
        ),
        ("callback: Func", "def Func(): pass", "rg_broken:Func must be a class, got a function"),
    ],
)
def test_a_broken_plugin_is_named_with_its_distribution_and_cause(install: Install, entry, source, message) -> None:
    kind, _, name = entry.partition(": ")
    install("pkg", {kind: [f"{name} = rg_broken:{name}"]}, rg_broken=source)
    with pytest.raises(DloError, match=message) as raised:
        Registry().load(name)
    assert isinstance(raised.value.__cause__, RuntimeError) == ("boom" in source)


def test_an_unknown_name_gets_the_nearest_of_its_kind(install: Install) -> None:
    install("pkg", {"strategy": ["fsdp = rg_none:Fsdp"]})
    with pytest.raises(DloError, match=r"^unknown strategy 'fsdp3'; did you mean 'fsdp'\?$"):
        Registry().load("fsdp3", "strategy")
    error = Registry().unknown("deepsped", "strategy", others=["deepspeed"])
    assert str(error) == "unknown strategy 'deepsped'; did you mean 'deepspeed'?"
    error = Registry().unknown("qqq", "applier")
    assert str(error).startswith("unknown applier 'qqq'; available: ActivationCheckpoint, ")
    with pytest.raises(DloError, match="'OneCycle' is a callback plug-in, not a strategy; available"):
        Registry().get("OneCycle", "strategy")


@pytest.mark.parametrize("kind", ["callback", "task"])
def test_a_name_taken_twice_is_listed_and_refused_when_used(install: Install, kind: str) -> None:
    install("first", {"callback": ["Twin = rg_first:Twin"]})
    install("second", {kind: ["Twin = rg_second:Twin"]}, "2.0")
    registry = Registry()
    twins = [plugin for plugin in registry.plugins() if plugin.name == "Twin"]
    assert len(twins) == 2
    for use in (registry.load, registry.get, lambda name: registry.find_named([name])):
        with pytest.raises(DloError, match=r"must be unique, got 'Twin' in first 1\.2 .* and in second 2\.0"):
            use("Twin")
    assert registry.conflict(twins[0]) == registry.conflict(twins[1])
    assert registry.conflict(registry.get("OneCycle")) is None


def test_a_distribution_seen_twice_is_one(install: Install, tmp_path: Path) -> None:
    install("pack", {"callback": ["Once = rg_once:Once", "Once = rg_once:Once"]})
    egg = tmp_path / "pack.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: pack\nVersion: 1.2\n")
    (egg / "entry_points.txt").write_text("[dlo_framework.plugins.callback]\nOnce = rg_once:Once\n")
    assert [plugin.names for plugin in Registry().plugins() if plugin.module == "rg_once"] == [("Once",)]
    Registry().find_named(["Once"])


def test_wrong_metadata_is_reported_and_touches_nothing_else(install: Install) -> None:
    install("typo", {"callbacks": ["Lost = rg_lost:Lost"], "task": ["Half = rg_half"]})
    registry = Registry()
    assert "OneCycle" in registry.names()
    assert not {"Lost", "Half"} & set(registry.names())
    problems = "\n".join(registry.problems)
    assert "unknown group 'dlo_framework.plugins.callbacks'; did you mean 'dlo_framework.plugins.callback'?" in problems
    assert "must have the form 'Name = module:Class', got 'Half = rg_half'" in problems


STRATEGY = '''
from lightning.pytorch.strategies import SingleDeviceStrategy

class RgStrategy(SingleDeviceStrategy):
    """A strategy."""

    def __init__(self, stage: int = 1):
        super().__init__()
        self.stage = stage

    @classmethod
    def register_strategies(cls, registry):
        registry.register("rg_two", cls, stage=2)

class RgChild(RgStrategy):
    """Inherits the registration, which is its parent's."""
'''


def test_aliases_are_one_plugin_that_lightning_knows(install: Install) -> None:
    lines = ["rg_two = rg_strategy:RgStrategy", "RgStrategy = rg_strategy:RgStrategy"]
    lines += ["rg_one=rg_strategy : RgStrategy", "RgChild = rg_strategy:RgChild"]
    install("pack", {"strategy": lines}, rg_strategy=STRATEGY)
    registry = Registry()
    (plugin,) = registry.find_named(["rg_one", "rg_two", "rg_strategy.RgStrategy"])
    assert (plugin.name, plugin.aliases) == ("RgStrategy", ("rg_one", "rg_two"))
    loaded = registry.load("rg_two", "strategy")
    assert Registry().load("RgStrategy") is loaded  # A second registry registers nothing twice.
    registry.load("RgChild")

    from lightning.pytorch.strategies import StrategyRegistry

    assert [StrategyRegistry.get(name).stage for name in ("rg_one", "rg_two")] == [1, 2]
    assert type(StrategyRegistry.get("rg_two")) is loaded
    for name in ("rg_one", "rg_two"):
        StrategyRegistry.remove(name)


def test_a_strategy_name_that_lightning_has_is_an_error(install: Install) -> None:
    source = STRATEGY.replace("rg_two", "ddp").replace("RgStrategy", "RgTaken")
    install("pack", {"strategy": ["RgTaken = rg_taken:RgTaken"]}, rg_taken=source)
    with pytest.raises(DloError, match=r"plugin 'RgTaken' \(pack 1.2\) failed to register its strategies"):
        Registry().load("RgTaken")


# --- sets of functions that configs name: the package's own, a user's file's, and installed packages' ----------------


GROUP = "nf_test.colours"
USER = """
from {module} import SET

@SET.register("olive")
def olive():
    return 3
"""


@pytest.fixture
def colours(project: Path, monkeypatch: pytest.MonkeyPatch) -> NamedFunctions:
    """A set with one function, in a folder of the path."""
    monkeypatch.syspath_prepend(str(project))
    found: NamedFunctions = NamedFunctions("colour", GROUP)
    found.register("red")(red)
    return found


def red() -> int:
    return 1


def blue() -> int:
    return 2


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
    message = r"colour names must be unique, got 'red' in .*red and in .*blue; rename one"
    with pytest.raises(DloError, match=message):
        colours.register("red")(blue)


def test_an_installed_packages_function_is_imported_when_it_is_named(colours, tmp_path):
    entries = {GROUP: ["teal = nf_pack:teal"]}
    distributions.install(tmp_path, "nf_pack", entries, nf_pack="def teal():\n    return 2\n")
    assert colours.names() == ["red", "teal"]
    assert "nf_pack" not in sys.modules
    assert list(colours.loaded()) == ["red"]
    assert colours.get("teal")() == 2
    assert list(colours.loaded()) == ["red", "teal"]


def test_a_package_that_cannot_be_imported_is_named_with_the_cause(colours, tmp_path):
    distributions.install(tmp_path, "nf_pack", {GROUP: ["teal = nf_pack:teal"]}, nf_pack="1 / 0")
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
