"""The user's own plug-ins under `plugins:`, and what a config may name."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser, set_parsing_settings
from lightning.pytorch import Callback

from dlo_framework.errors import DloError
from dlo_framework.registry import Registry
from dlo_framework.testing import run_distributed
from support.distributions import CALLBACK


def write(path: str, source: str) -> str:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    return path


def test_a_file_is_registered_with_its_origin(project: Path) -> None:
    registry = Registry()
    (plugin,) = registry.load_user_module(write("./um_file.py", CALLBACK.format(name="UmFile")))
    assert (plugin.name, plugin.kind, plugin.origin) == ("UmFile", "callback", "./um_file.py")
    assert plugin.class_path == "um_file.UmFile"
    assert registry.load("UmFile").__module__ == "um_file"
    assert [found.name for found in registry.find_named(["um_file.UmFile"])] == ["UmFile"]


def test_loading_twice_is_fine_in_any_spelling(project: Path) -> None:
    write("um_again.py", CALLBACK.format(name="UmAgain"))
    registry = Registry()
    found = [
        registry.load_user_module(s) for s in ("./um_again.py", "um_again.py", str(project / "um_again.py"), "um_again")
    ]
    assert len({id(registry.load(plugins[0].name)) for plugins in found}) == 1
    assert registry.names("callback").count("UmAgain") == 1


def test_two_files_of_one_name_are_two_modules(project: Path) -> None:
    registry = Registry()
    specs = {"./a/plugin.py": "a.plugin", "./b/plugin.py": "b.plugin", "./my-c/plugin.py": "plugin"}
    for index, (spec, module) in enumerate(specs.items()):
        (plugin,) = registry.load_user_module(write(spec, CALLBACK.format(name=f"UmSame{index}")))
        assert plugin.module == module
    (last,) = registry.load_user_module(write("./my-d/plugin.py", CALLBACK.format(name="UmSame9")))
    assert last.module.startswith("user_plugin_")
    assert registry.load_user_module("./my-d/plugin.py") == [last]
    assert registry.load("UmSame9") is not registry.load("UmSame2")


@pytest.mark.parametrize("name", ["torch", "json", "not-a-name", "class"])
def test_a_file_that_is_named_as_another_module_shadows_nothing(project: Path, name: str) -> None:
    there, path = sys.modules.get(name), list(sys.path)
    (plugin,) = Registry().load_user_module(write(f"./{name}.py", CALLBACK.format(name="UmShadow")))
    assert plugin.module != name
    assert all(part.isidentifier() for part in plugin.module.split("."))
    assert sys.modules.get(name) is there
    assert sys.path[: len(path)] == path


def test_a_file_in_a_package_keeps_its_relative_imports(project: Path) -> None:
    write("um_pkg/__init__.py", "")
    write("um_pkg/sub/__init__.py", "")
    write("um_pkg/sub/base.py", CALLBACK.format(name="UmBase"))
    write("um_pkg/sub/mod.py", 'from .base import UmBase\n\nclass UmChild(UmBase):\n    """Child."""\n')
    (plugin,) = Registry().load_user_module("./um_pkg/sub/mod.py")
    assert plugin.class_path == "um_pkg.sub.mod.UmChild"
    (base,) = Registry().load_user_module("um_pkg.sub.base")
    assert base.name == "UmBase"


def test_a_file_finds_its_neighbours(project: Path) -> None:
    write("./um_neighbour.py", "VALUE = 3")
    source = "import um_neighbour\n" + CALLBACK.format(name="UmHasNeighbour") + "    value = um_neighbour.VALUE\n"
    registry = Registry()
    registry.load_user_module(write("./um_has_neighbour.py", source))
    assert registry.load("UmHasNeighbour").value == 3


def test_a_package_registers_what_its_modules_define(project: Path) -> None:
    write("um_pack/_inner.py", CALLBACK.format(name="UmInner"))
    write("um_pack/__init__.py", "from lightning.pytorch import Trainer\nfrom um_pack._inner import UmInner\n")
    registry = Registry()
    assert [plugin.name for plugin in registry.load_user_module("um_pack")] == ["UmInner"]
    registry.allow_class_path("um_pack._inner.UmInner")


DATASET = '''
import multiprocessing

if multiprocessing.parent_process() is None:
    from lightning.pytorch import LightningDataModule
else:  # A worker need not wait for the import.
    LightningDataModule = object

class UmItem:
    """Goes to a worker by pickle."""

    value = 7

class UmData(LightningDataModule):
    """Data."""
'''


def test_a_spawned_worker_can_unpickle_a_files_classes(project: Path) -> None:
    Registry().load_user_module(write("./nested/um_spawn.py", DATASET))
    item = sys.modules["nested.um_spawn"].UmItem
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        # The worker has no registry: it gets the class by importing the name in the pickle.
        assert pool.apply(getattr, (item, "value")) == 7


def test_every_kind_is_recognised_and_what_is_private_abstract_imported_or_no_plugin_left_out(project: Path) -> None:
    source = """
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from dlo_framework.plan import Applier, Phase

class _Hidden(Callback): pass
class Unfinished(Applier): pass
class Helper: pass
class UmCallback(Callback): pass
class UmTask(LightningModule): pass
class UmData2(LightningDataModule): pass
class UmStrategy(SingleDeviceStrategy): pass
class UmApplier(Applier):
    phase = Phase.COMPILE
    def apply(self, module, mesh, plan): pass
"""
    found = Registry().load_user_module(write("./um_kinds.py", source))
    assert sorted((plugin.kind, plugin.name) for plugin in found) == [
        *(("applier", "UmApplier"), ("callback", "UmCallback"), ("data", "UmData2")),
        *(("strategy", "UmStrategy"), ("task", "UmTask")),
    ]


def test_a_module_of_networks_only_may_be_listed(project: Path) -> None:
    registry = Registry()
    source = "from torch import nn\n\nclass Net(nn.Module):\n    pass\n"
    assert registry.load_user_module(write("./um_nets.py", source)) == []
    registry.allow_class_path("um_nets.Net")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('boom')", "plugins: './um_bad.py' failed to import: RuntimeError: boom"),
        ("def f(:", "plugins: './um_bad.py' failed to import: SyntaxError"),
        ("import um_nothing_like_it", "ModuleNotFoundError: No module named 'um_nothing_like_it'"),
        (CALLBACK.format(name="OneCycle"), "must be unique, got 'OneCycle' in dlo_framework .* and in ./um_bad.py"),
    ],
)
def test_a_bad_file_is_an_error_that_says_why(project: Path, source: str, message: str) -> None:
    with pytest.raises(DloError, match=message):
        Registry().load_user_module(write("./um_bad.py", source))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./um_presnt.py", r"no file './um_presnt.py' in .*; did you mean 'um_present.py'\?"),
        ("./nowhere/x.py", "the folder .*nowhere does not exist"),
        ("./sub", r"'./sub' must be a file, got a folder; name a file, './sub/NAME.py'"),
        ("./notes.txt", r"must end in .py, got './notes.txt'"),
        ("um-x", r"must be a module \(my_pkg.mod\) or a file \(./file.py\), got 'um-x'"),
        ("um_presnt", r"no module 'um_presnt'; did you mean 'um_present'\?"),
        ("lightning.pytorch.callback", "no module 'lightning.pytorch.callback'"),
    ],
)
def test_what_is_not_there_is_an_error_with_the_nearest(project: Path, spec: str, message: str) -> None:
    write("um_present.py", "")
    write("notes.txt", "")
    (project / "sub").mkdir()
    with pytest.raises(DloError, match=message):
        Registry().load_user_module(spec)


def test_an_installed_plugins_own_module_may_be_listed(project: Path) -> None:
    registry = Registry()
    found = registry.load_user_module("dlo_plugins.schedules.lr_curves")
    assert "OneCycle" in [plugin.name for plugin in found]
    assert registry.get("OneCycle").distribution == "dlo_framework"


# --- what a config may name, asked of the registry and of jsonargparse itself ----------------------------------------


@pytest.mark.parametrize(
    "path",
    ["OneCycle", "torch.optim.AdamW", "lightning.pytorch.callbacks.EarlyStopping", "timm.x.Y", "dlo_tasks.a.B"],
)
def test_short_names_and_the_libraries_are_allowed(path: str) -> None:
    Registry().allow_class_path(path)


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("os.system", "add 'plugins: \\[os\\]'"),
        ("some_pkg.mod.Thing", "add 'plugins: \\[some_pkg.mod\\]'"),
        ("torchx.Thing", "did you mean 'torch.Thing'"),
        ("pytorch_lightning.callbacks.EarlyStopping", "write 'lightning.pytorch.callbacks.EarlyStopping'"),
        ("torch.hub.load", "'torch.hub' runs or loads what its arguments name"),
        ("torch.load", "'torch.load' runs or loads"),
    ],
)
def test_the_rest_is_refused_with_a_way_out(path: str, fix: str) -> None:
    with pytest.raises(DloError, match=f"class_path '{path}' is refused: .*{fix}"):
        Registry().allow_class_path(path)


def _parse(rank: int, world_size: int, folder: Path, class_paths: list[str]) -> dict[str, str | bool]:
    """Returns what jsonargparse makes of each path, in a process whose settings of the parser are its own."""
    os.chdir(folder)
    registry = Registry()
    registry.load_user_module("./ip_mine.py")
    set_parsing_settings(
        import_path_denylist=registry.denied_import_paths(),
        import_path_allowlist=registry.allowed_import_paths(),
    )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    found: dict[str, str | bool] = {}
    for class_path in class_paths:
        try:
            parsed = parser.parse_object({"callback": {"class_path": class_path}})
            found[class_path] = type(parser.instantiate(parsed).callback).__name__
        except Exception as error:
            found[class_path] = "refused" if "is not allowed" in str(error) else repr(error)
    return found | {"imported": "ip_other" in sys.modules}


def test_jsonargparse_refuses_before_it_imports(tmp_path: Path) -> None:
    expected = {
        "Mine": "Mine",
        "ip_mine.Mine": "Mine",
        "lightning.pytorch.callbacks.Timer": "Timer",
        "Timer": "Timer",
        "os.system": "refused",
        "ip_other.Other": "refused",
        "torch.os.system": "refused",
        "torch.hub.load": "refused",
        "torch.load": "refused",
        "imported": False,
    }
    callback = "from lightning.pytorch import Callback\n\nclass {}(Callback):\n    pass\n"
    (tmp_path / "ip_mine.py").write_text(callback.format("Mine"))
    (tmp_path / "ip_other.py").write_text(callback.format("Other"))
    paths = [path for path in expected if path != "imported"]
    assert run_distributed(_parse, 1, tmp_path, paths, backend=None) == [expected]
