"""The documentation's pages: each plug-in has one, and what they show is what the code takes."""

import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from dlo_framework.cli.command_table import CORE_COMMANDS, RUN_COMMANDS, installed_commands
from dlo_framework.cli.config_scan import list_shipped_configs
from dlo_framework.cli.parse_errors import list_parameters
from dlo_framework.registry import KINDS
from support.doc_pages import entry_points, read_blocks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

#: Names that the pages make up for the reader's own files and classes.
MADE_UP_CONFIGS = {
    "my.yaml",
    "machine.yaml",
    "own_data.yaml",
    "own_transformer.yaml",
    "x.yaml",
    "runs/quickstart/version_0/config.yaml",
}
MADE_UP_CLASSES = {
    "LineLogger": {"path"},
    "ChannelsLast": {},
    "EpochClock": {"every"},
    "WeightNormLogger": {"every_n_steps", "depth"},
}


def nav_pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_pages(item)


def blocks(*languages: str) -> list[tuple[Path, str]]:
    """Every fenced block of a language, without those that `docs/fill.py` fills."""
    return [(path, block.text) for path in TEXTS for block in read_blocks(path) if block.language in languages]


def identify(values: list[tuple[Path, str]]) -> list[str]:
    return [f"{path.stem}-{number}" for number, (path, _) in enumerate(values)]


def nav() -> list[str]:
    return list(nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


def test_the_navigation_has_every_page_once():
    assert sorted(nav()) == [path.relative_to(DOCS).as_posix() for path in PAGES]


def test_each_registered_plugin_is_on_one_page():
    pages = [path.read_text() for path in (DOCS / "plugins").glob("*.md")]
    for name, (_, target) in entry_points().items():
        assert sum(f"::: {target}\n" in text and f"class_path: {name}\n" in text for text in pages) == 1, name


YAML = blocks("yaml")


@pytest.mark.parametrize("block", YAML, ids=identify(YAML))
def test_a_config_in_the_pages_fits_its_classes(block):
    config = yaml.safe_load(block[1])
    assert set(config) <= {"plugins", "trainer", "model", "data", "run", "seed_everything"}
    assert set(config.get("trainer", {})) <= set(list_parameters(Trainer))
    for class_path, arguments in classes(config):
        assert set(arguments) <= set(accepted(class_path)), class_path


def classes(content: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(content, dict):
        if "class_path" in content:
            yield content["class_path"], content.get("init_args", {})
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from classes(value)


def accepted(class_path: str) -> set[str]:
    if class_path in MADE_UP_CLASSES:
        return set(MADE_UP_CLASSES[class_path])
    path = entry_points()[class_path][1] if class_path in entry_points() else class_path
    module, _, name = path.rpartition(".")
    ours = "dlo_framework.models.attention"  # Its patterns have short names as values of an option.
    homes = [module] if module else [ours, "lightning.pytorch.callbacks", "lightning.pytorch.loggers"]
    cls = next(getattr(home, name) for home in map(importlib.import_module, homes) if hasattr(home, name))
    assert inspect.isclass(cls)
    return set(list_parameters(cls) or ())


COMMANDS = [
    (path, line.removeprefix("$ "))
    for path, block in blocks("console", "bash", "")
    for line in block.splitlines()
    if line.removeprefix("$ ").startswith("dlo ") and not line.startswith("dlo 0.")
]


@pytest.mark.parametrize("command", COMMANDS, ids=identify(COMMANDS))
def test_a_command_in_the_pages_names_what_there_is(command):
    words = shlex.split(command[1].partition(" > ")[0])[1:]
    assert words[0] in {"--help", *RUN_COMMANDS, *CORE_COMMANDS, *installed_commands()}
    if words[0] == "plugins" and words[1:2] == ["new"]:
        assert words[2] in KINDS
    elif words[0] == "plugins" and words[1:2] == ["show"]:
        assert words[2] in {*entry_points(), *MADE_UP_CLASSES, "NAME"}
    for option, value in zip(words, [*words[1:], ""], strict=True):
        if option == "--config":
            assert value in {*list_shipped_configs(), *MADE_UP_CONFIGS} or (ROOT / value).is_file()
        elif option.startswith("--trainer.") and option != "--trainer.max_epoch":  # That one shows the message.
            assert option.removeprefix("--trainer.").rstrip("+") in list_parameters(Trainer)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_into_the_tree_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text())
    inside = [link for link in links if "://" not in link]
    assert [link for link in inside if not (ROOT / link).exists()] == []
