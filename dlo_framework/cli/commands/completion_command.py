"""``dlo completion``: prints a script that completes commands, options and names in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from dlo_framework.cli.command_table import CKPT_PATH, CORE_COMMANDS, RUN_COMMANDS, SECTIONS, summarise_installed
from dlo_framework.cli.commands.schema_command import schema_of_type
from dlo_framework.cli.config_scan import CommandParser, list_shipped_configs
from dlo_framework.errors import DloError
from dlo_framework.registry import KINDS, Registry
from dlo_framework.registry.class_source import read_class

SHELLS = ("bash", "zsh")
DESCRIPTION = """Print a script that completes commands, options, plug-ins and configs in a shell.

  bash: dlo completion bash > ~/.local/share/bash-completion/completions/dlo
  zsh:  dlo completion zsh > FOLDER/_dlo, for a folder of your $fpath

Make it again when you have installed other plug-ins."""


def main(argv: list[str]) -> int:
    """Prints the script."""
    parser = CommandParser("dlo completion", description=DESCRIPTION)
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script")
    shell = parser.parse_args(argv or ["--help"]).shell
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise DloError(
            "dlo completion needs the package shtab, which is not installed; pip install 'dlo_framework[completion]'"
        ) from error
    preamble: Any = make_preamble()  # By shell; shtab's (1.13) annotation has one for all.
    print(shtab.complete(make_parser(Registry()), shell, preamble=preamble))
    return 0


#: Shell functions that complete a word or a file: the name of a shipped config, or a checkpoint's.
_CONFIG, _START, _CHECKPOINT = "_dlo_config", "_dlo_start", "_dlo_checkpoint"


def make_parser(registry: Registry) -> argparse.ArgumentParser:
    """Returns a parser with every command, and with the options and choices that can be completed.

    Args:
        registry: Registry of the plug-ins.
    """
    parser = argparse.ArgumentParser(prog="dlo")
    commands = parser.add_subparsers(dest="command")
    names = {kind: [plugin.name for plugin in registry.plugins(kind)] for kind in KINDS}
    for name, summary in RUN_COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        _add_run_options(command, registry, names, CKPT_PATH[name])
    installed = summarise_installed()
    for name, summary in installed.items():
        if " " not in name:
            _add_run_options(commands.add_parser(name, help=summary), registry, names, CKPT_PATH["fit"])
    for name, summary in CORE_COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        more = {key.partition(" ")[2]: text for key, text in installed.items() if key.startswith(f"{name} ")}
        _add_words(command, name, names, more)
    return parser


def _add_run_options(
    command: argparse.ArgumentParser, registry: Registry, names: dict[str, list[str]], ckpt_path: str
) -> None:
    config: Any = command.add_argument("--config", metavar="FILE", help="path, or name of a shipped config")
    config.complete = {"bash": _CONFIG, "zsh": _CONFIG}
    path: Any = command.add_argument("--ckpt_path", metavar="PATH", help=ckpt_path)
    word = _START if command.prog.endswith(" fit") else _CHECKPOINT
    path.complete = {"bash": word, "zsh": word}
    strategies = [name for plugin in registry.plugins("strategy") for name in plugin.aliases]
    choices: dict[str, Iterable[str]] = {
        "model": names["task"],
        "data": names["data"],
        "trainer.callbacks+": names["callback"],
        "trainer.strategy": ["auto", "ddp", *strategies],
    }
    for section, target in SECTIONS.items():
        for parameter in read_class(target).parameters:
            values = schema_of_type(parameter.type).get("enum", ())
            choices.setdefault(f"{section}.{parameter.name}", values)
    for key, values in choices.items():
        command.add_argument(f"--{key}", choices=list(values) or None)
    parts = {"model": registry.plugins("task"), "data": registry.plugins("data")}
    for part, plugins in parts.items():
        for key in dict.fromkeys(p.name for plugin in plugins for p in read_class(plugin.target).parameters):
            command.add_argument(f"--{part}.{key}")
    for key in ("plugins", "seed_everything"):
        command.add_argument(f"--{key}")
    command.add_argument("--print_config", action="store_true")
    command.add_argument("--help-all", action="store_true")
    command.add_argument("--dry-run", action="store_true")


def _add_words(
    command: argparse.ArgumentParser, name: str, names: dict[str, list[str]], installed: dict[str, str]
) -> None:
    """Adds the words that follow a command of the core, also of installed commands of two words.

    shtab leaves out those without a help text.
    """
    if name == "completion":
        command.add_argument("shell", choices=["bash", "zsh"])
    if name == "configs":
        command.add_argument("name", nargs="?", choices=list(list_shipped_configs()))
    if name == "plugins":
        words = command.add_subparsers(dest="word")
        words.add_parser("show", help="show one plug-in").add_argument(
            "name", choices=[each for kind in KINDS for each in names[kind]]
        )
        words.add_parser("new", help="write a plug-in").add_argument("kind", choices=KINDS)
    if name == "checkpoint":
        words = command.add_subparsers(dest="word")
        for word in ("inspect", "verify", "convert", "export"):
            path: Any = words.add_parser(word, help=f"{word} a checkpoint").add_argument("path")
            path.complete = {"bash": _CHECKPOINT, "zsh": _CHECKPOINT}
    if name == "config":
        words = command.add_subparsers(dest="word")
        for word, summary in installed.items():
            words.add_parser(word, help=summary)
        diff = words.add_parser("diff", help="compare two configs")
        for argument in ("first", "second"):
            config: Any = diff.add_argument(argument)
            config.complete = {"bash": _CONFIG, "zsh": _CONFIG}


def make_preamble() -> dict[str, str]:
    """Returns the shell functions that the completion calls, by shell."""
    words = {_CONFIG: " ".join(list_shipped_configs()), _START: "last best auto", _CHECKPOINT: "last best"}
    bash = [
        f'{name}() {{\n  compgen -W "{choices}" -- "$1"\n  compgen -f -- "$1"\n}}' for name, choices in words.items()
    ]
    zsh = [f"{name}() {{\n  compadd -- {choices}\n  _files\n}}" for name, choices in words.items()]
    return {"bash": "\n".join(bash), "zsh": "\n".join(zsh)}
