"""Table of the commands of ``dlo``, the core's own and those that installed packages add, and their help on one screen.

A command is a function that takes the arguments after its name and returns the exit code, and one entry point in the
group ``dlo_framework.commands``::

    [options.entry_points]
    dlo_framework.commands =
        hello = my_package.hello:main

``dlo --help-all`` reads the function's docstring from the source: the first paragraph describes the command, and
lines that begin with ``dlo hello`` are its examples. A name of two words, ``config hello``, is a command of ``dlo
config``. The module is imported when the command runs, so that a broken or slow package costs the other commands
nothing.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable, Iterable
from importlib import metadata

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.extensions import format_origin, installed_points, load_function
from dlo_framework.registry import Registry
from dlo_framework.registry.class_source import SourceNotFoundError, read_function_doc, summary_of

GROUP = "dlo_framework.commands"
#: Group of the systems that start a run's ranks, and the option of ``dlo fit`` that names one.
ENGINES, ENGINE = "dlo_framework.engines", "--engine"

#: Commands that train or evaluate; :func:`dlo_framework.cli.run.run` runs them.
RUN_COMMANDS = {
    "fit": "train a model, validating as it goes",
    "validate": "evaluate a checkpoint on the validation data",
    "test": "evaluate a checkpoint on the test data",
    "predict": "run a checkpoint on data without targets",
}

#: The core's other commands; ``checkpoint`` is ``main`` of the module ``commands.checkpoint_command``.
CORE_COMMANDS = {
    "checkpoint": "show, check, convert or export a checkpoint",
    "parity": "train on several ranks and as one process, and compare step by step",
    "plugins": "list the plug-ins, show one, or write a new one",
    "configs": "list the shipped configs, or print one",
    "config": "compare two configs",
    "completion": "print a script that completes commands and names in bash or zsh",
    "schema": "print the JSON schema of configs, for completion in editors",
    "doctor": "check this machine: devices, disk, ports, packages, a collective of two ranks",
}


#: Commands that ``dlo --help`` describes beside those that train or evaluate.
FIRST = ("parity", "plugins", "configs", "checkpoint", "doctor")

#: Classes whose arguments are keys of a config, by the section; their sources are read without an import.
SECTIONS = {
    "trainer": "lightning.pytorch.trainer.trainer:Trainer",
    "run": "dlo_framework.cli.lightning_cli:RunOptions",
}


#: Commands by the words that other tools have for them.
_OTHER_WORDS = {
    **dict.fromkeys(("train", "run", "launch", "resume", "finetune", "sft"), "fit"),
    **dict.fromkeys(("eval", "evaluate", "val"), "validate"),
    **dict.fromkeys(("infer", "inference", "generate"), "predict"),
    **dict.fromkeys(("env", "check", "collect-env"), "doctor"),
    **dict.fromkeys(("find-lr", "lr_find", "lrfind", "tune"), "lr-find"),
    **dict.fromkeys(("search", "hpo"), "sweep"),
    **dict.fromkeys(("export", "convert", "merge"), "checkpoint"),
    **dict.fromkeys(("list", "ls"), "configs"),
}


def installed_commands() -> dict[str, list[metadata.EntryPoint]]:
    """Returns the commands of installed distributions by name; two of one name are a conflict."""
    commands: dict[str, list[metadata.EntryPoint]] = {}
    for point in sorted(installed_points().select(group=GROUP), key=lambda point: point.name):
        commands.setdefault(point.name, []).append(point)
    return commands


def load_command(name: str) -> Callable[[list[str]], int | None]:
    """Imports a command of the core or of an installed distribution, and no other.

    Raises:
        DloError: If the command is unknown, two distributions have it, or its import fails.
    """
    if name in CORE_COMMANDS:
        main: Callable[[list[str]], int] = importlib.import_module(f"{__package__}.commands.{name}_command").main
        return main
    installed = installed_commands()
    if name not in installed:
        known = list(dict.fromkeys([*RUN_COMMANDS, *CORE_COMMANDS, *installed]))
        other = _OTHER_WORDS.get(name)
        hint = f"; did you mean '{other}'?" if other in known else did_you_mean(name, known) or ";"
        raise DloError(f"unknown command '{name}'{hint} available: {', '.join(known)}")
    if len(installed[name]) > 1:
        raise DloError(_format_conflict(name, map(format_origin, installed[name])))
    return load_function(installed[name][0], "command")


def load_engine(words: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """Imports the system that ``dlo fit --engine NAME`` names, and splits it off.

    Args:
        words: Arguments after ``dlo``.

    Returns:
        The system's function, and the arguments after ``fit`` without the option.

    Raises:
        DloError: If it is unknown, or its import fails.
    """
    at = next(place for place, word in enumerate(words) if word.partition("=")[0] == ENGINE)
    name = words[at].partition("=")[2] or "".join(words[at + 1 : at + 2])
    rest = words[1:at] + words[at + (1 if "=" in words[at] else 2) :]
    known = {point.name: point for point in installed_points().select(group=ENGINES)}
    if name not in known:
        raise DloError(f"unknown engine '{name}'{did_you_mean(name, known) or ';'} available: {', '.join(known)}")
    return load_function(known[name], "engine"), rest


def _format_conflict(name: str, origins: Iterable[str]) -> str:
    return f"command names must be unique, got '{name}' in {' and in '.join(sorted(origins))}; uninstall one"


def summarise_installed() -> dict[str, str]:
    """Returns the summaries of the installed commands by name; of two of one name the first's."""
    return {name: _summarise(_read_doc(points[0])) for name, points in installed_commands().items()}


def _read_doc(point: metadata.EntryPoint) -> str:
    try:
        return read_function_doc(point.value.replace(" ", ""))
    except SourceNotFoundError as error:
        return f"(not found: {error})"


def _summarise(doc: str) -> str:
    summary = summary_of(doc).removesuffix(".")
    return summary[:1].lower() + summary[1:]


def format_first_commands() -> str:
    """Returns, for ``dlo --help``, the commands that most people need, described, and the others' names."""
    described = RUN_COMMANDS | {name: CORE_COMMANDS[name] for name in FIRST}
    lines = [f"  {name:<12}{text}" for name, text in described.items()]
    others = sorted({*CORE_COMMANDS, *installed_commands()} - described.keys())
    more = textwrap.wrap(", ".join(others), _WIDTH - 14, break_on_hyphens=False, break_long_words=False)
    lines += [f"  {'' if number else 'and':<12}{line}" for number, line in enumerate(more)]
    return "\n".join([*lines, f"  {HELP_ALL:<12}describes all of them", f"  {'--version':<12}of dlo and its libraries"])


def format_commands() -> tuple[str, str]:
    """Returns, for ``dlo --help-all``, the commands with descriptions, and the examples of installed commands."""
    summaries, examples, warnings = RUN_COMMANDS | CORE_COMMANDS, [], []
    for name, points in installed_commands().items():
        origins = [*(["dlo"] if name in summaries else []), *map(format_origin, points)]
        if len(origins) > 1:
            warnings.append(f"warning: {_format_conflict(name, origins)}")
            continue
        doc = _read_doc(points[0])
        summaries[name] = _summarise(doc)
        examples += re.findall(rf"^\s*(dlo {re.escape(name)}\b.*)$", doc, re.MULTILINE)
    width = max(map(len, summaries))
    lines = [f"  {name:<{width}}  {text}" for name, text in summaries.items()]
    return "\n".join([*lines, *warnings]), "\n".join(f"  {example}" for example in examples)


# --- help of the commands that train or evaluate -------------------------------------------------------------------

#: Words that show this help, and those that show every key.
HELP_WORDS, HELP_ALL = ("-h", "--help"), "--help-all"
#: What ``--ckpt_path`` takes, by command.
CKPT_PATH = {
    "fit": "checkpoint to resume from: a path, last, best, or auto, which starts a run if none is unfinished",
    "validate": "checkpoint to evaluate: a path, last or best; without it the weights are untrained",
    "test": "checkpoint to evaluate: a path, last or best; without it the weights are untrained",
    "predict": "checkpoint to predict with: a path, last or best; without it the weights are untrained",
}
#: Keys of the Trainer that most runs set.
_TRAINER = (
    "max_epochs, max_steps, devices, num_nodes, precision, accumulate_grad_batches, gradient_clip_val,"
    " limit_train_batches, val_check_interval, log_every_n_steps, logger, fast_dev_run"
)
_WIDTH, _KEY = 104, 28


def format_run_help(command: str) -> str:
    """Returns the help of a command that trains or evaluates.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
    """
    registry = Registry()
    names = {kind: [plugin.name for plugin in registry.plugins(kind)] for kind in ("task", "data")}
    strategies = [name for plugin in registry.plugins("strategy") for name in plugin.short_names]
    rows = [
        ("--config FILE", "config: a path, or a name that `dlo configs` lists; of several, later ones override"),
        ("--ckpt_path WHICH", CKPT_PATH[command]),
        ("--model NAME", f"task, or path of a LightningModule of --plugins: {', '.join(names['task'])}"),
        ("--model.KEY VALUE", f"its option; `dlo plugins show {names['task'][0]}` lists them"),
        ("--data NAME", f"data, or path of a LightningDataModule of --plugins: {', '.join(names['data'])}"),
        ("--data.KEY VALUE", f"its option; `dlo plugins show {names['data'][0]}` lists them"),
        ("--trainer.strategy NAME", f"auto, ddp, {', '.join(strategies)}"),
        ("--trainer.callbacks+ NAME", "callback, added to the config's; `dlo plugins` lists them"),
        ("--trainer.callbacks.N.KEY", "option of the callback of class N, where the run has several"),
        ("--trainer.KEY VALUE", f"argument of Lightning's Trainer, such as {_TRAINER}"),
        ("--run.name, --run.dir", "folder of the run: DIR/NAME/version_0; by default runs/ and the first config"),
        ("--run.KEY VALUE", "async_checkpoints, checkpoint_format, predictions, save_minutes, stop_grace"),
        ("--plugins [FILE, ...]", "modules and files of your own to import"),
        ("--seed_everything SEED", "seed; 42 by default"),
        ("--print_config", "prints the config with every default, and ends; --print_config=skip_default without them"),
        (ENGINE + " ray", "starts the ranks on a Ray cluster: --workers 8, or MIN:MAX, --max_restarts 3"),
        ("--dry-run", "checks the run and describes it: ranks, mesh, memory, steps; starts nothing"),
        (HELP_ALL, "every key of the Trainer, with types and defaults"),
    ]
    summary = RUN_COMMANDS[command]
    lines = [f"usage: dlo {command} --config FILE [--KEY VALUE ...]", "", f"{summary[0].upper()}{summary[1:]}.", ""]
    for key, text in rows:
        wrapped = textwrap.wrap(text, _WIDTH - _KEY - 2, break_on_hyphens=False)
        lines += [f"  {'' if number else key:<{_KEY - 1}} {line}" for number, line in enumerate(wrapped)]
    examples = [f"dlo {command} --config quickstart", f"dlo {command} --config my.yaml --ckpt_path last"]
    return "\n".join([*lines, "", "examples:", *(f"  {example}" for example in examples)])
