"""What a config may name, asked of the registry and of jsonargparse itself."""

import os
import sys
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser, set_parsing_settings
from lightning.pytorch import Callback

from dlo_framework.errors import DloError
from dlo_framework.registry import Registry
from dlo_framework.testing import run_distributed


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
