"""Which package may import which, and what a light command may not pull in."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlo_framework.registry import Registry

ROOT = Path(__file__).resolve().parents[1]

#: A package, its folder, and the packages that it must never import.
RULES = {
    "dlo_framework": (ROOT / "dlo_framework", {"dlo_plugins", "dlo_tasks"}),
    "dlo_plugins": (ROOT / "plugins" / "dlo_plugins", {"dlo_tasks"}),
    "dlo_tasks": (ROOT / "tasks" / "dlo_tasks", {"dlo_plugins"}),
}

HEAVY = {"torch", "lightning", "torchvision", "timm", "transformers", "numpy", "tensorboard", "deepspeed", "rich"}


def imported(source: str) -> Iterator[str]:
    """Yields the top-level packages that a file imports anywhere: at its top, in a function, for types alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(a.value).partition(".")[0] for a in node.args if isinstance(a, ast.Constant))


@pytest.mark.parametrize("package", RULES)
def test_packages_import_in_one_direction(package: str) -> None:
    folder, forbidden = RULES[package]
    files = sorted(folder.rglob("*.py"))
    assert files
    found = {file.relative_to(ROOT): forbidden & set(imported(file.read_text())) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


def words_of(source: str) -> Iterator[str]:
    """Yields the names and texts of a file's code: no comments, and no docstrings."""
    tree = ast.parse(source)
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = {id(node.body[0].value) for node in documented if ast.get_docstring(node) is not None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def plugin_names() -> set[str]:
    """Returns the class names of the built-in plug-ins and tasks, and the packages that they are in."""
    found = [plugin for plugin in Registry().plugins() if plugin.distribution == "dlo_framework"]
    found = [plugin for plugin in found if not plugin.module.startswith("dlo_framework.")]
    return {plugin.name for plugin in found} | {plugin.module.partition(".")[0] for plugin in found}


def test_the_core_names_no_plugin() -> None:
    """Neither in code nor in messages, but for old import paths; the core records the version of `deepspeed`."""
    names = re.compile(rf"\b({'|'.join(sorted(plugin_names()))})\b|(?i:deep_?speed)")
    core = ROOT / "dlo_framework"
    files = [file for file in core.rglob("*.py") if file.name != "moved.py"]
    found = {
        (file.relative_to(core).as_posix(), match.group())
        for file in files
        for word in words_of(file.read_text())
        for match in names.finditer(word)
    }
    assert len(files) > 90
    assert found - {("extensions.py", "deepspeed")} == set()


#: Run one after the other: what one of them imports stays.
LIGHT = [
    "import dlo_framework",
    "import dlo_framework as dlo; dir(dlo); hasattr(dlo, 'OneCylce')",
    "import dlo_framework.registry",
    "import dlo_framework.cli.commands.plugins_command",
    "from dlo_framework.cli.commands.plugins_command import main; main([])",
    "from dlo_framework.cli.commands.plugins_command import main; main(['show', 'OneCycle'])",
    "from dlo_framework.cli.main import main; main(['--help'])",
    "from dlo_framework.cli.main import main; main(['fit', '--help'])",
    "import dlo_framework.cli.commands.checkpoint_command",
]


def test_light_commands_import_nothing_heavy() -> None:
    told = "import sys; print(); print(*sys.modules)"
    code = "\n".join(f"{statement}\n{told}" for statement in LIGHT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for statement, line in zip(LIGHT, [x for x in done.stdout.splitlines() if x.startswith("sys ")], strict=True):
        loaded = {name.partition(".")[0] for name in line.split()}
        assert "dlo_framework" in loaded
        assert loaded & (HEAVY | {"dlo_plugins", "dlo_tasks"}) == set(), statement


#: Clients of networks, and the modules that may use them: docs/start/watch.md says what for.
CLIENTS = re.compile(
    r"^\s*(?:import|from) (requests|httpx|aiohttp|urllib3|urllib\.request|http\.client|fsspec)\b", re.M
)
CONNECTS = {"dlo_framework/data/remote.py": {"fsspec"}, "tasks/dlo_tasks/language/tokenizer.py": {"urllib.request"}}


def test_only_named_modules_open_connections() -> None:
    files = [file for folder, _ in RULES.values() for file in sorted(folder.rglob("*.py"))]
    found = {file.relative_to(ROOT).as_posix(): set(CLIENTS.findall(file.read_text())) for file in files}
    assert {file: clients for file, clients in found.items() if clients} == CONNECTS
