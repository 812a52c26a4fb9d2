"""Help of ``dlo fit | validate | test | predict`` on one screen, made without an import of torch or a plug-in."""

from __future__ import annotations

import textwrap

from dlo_framework.cli.command_table import RUN_COMMANDS
from dlo_framework.registry import Registry

#: Words that show this help, and those that show every key.
HELP, HELP_ALL = ("-h", "--help"), "--help-all"
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
    first = {kind: _names(registry, kind)[0] for kind in ("task", "data")}
    rows = [
        ("--config FILE", "config: a path, or a name that `dlo configs` lists; of several, later ones override"),
        ("--ckpt_path WHICH", CKPT_PATH[command]),
        ("--model NAME", f"task, or path of a LightningModule of --plugins: {', '.join(_names(registry, 'task'))}"),
        ("--model.KEY VALUE", f"its option; `dlo plugins show {first['task']}` lists them"),
        ("--data NAME", f"data, or path of a LightningDataModule of --plugins: {', '.join(_names(registry, 'data'))}"),
        ("--data.KEY VALUE", f"its option; `dlo plugins show {first['data']}` lists them"),
        ("--trainer.strategy NAME", f"auto, ddp, {', '.join(_short_strategies(registry))}"),
        ("--trainer.callbacks+ NAME", "callback, added to the config's; `dlo plugins` lists them"),
        ("--trainer.callbacks.N.KEY", "option of the callback of class N, where the run has several"),
        ("--trainer.KEY VALUE", f"argument of Lightning's Trainer, such as {_TRAINER}"),
        ("--run.name, --run.dir", "folder of the run: DIR/NAME/version_0; by default runs/ and the first config"),
        ("--run.KEY VALUE", "async_checkpoints, checkpoint_format, predictions, save_minutes, stop_grace"),
        ("--plugins [FILE, ...]", "modules and files of your own to import"),
        ("--seed_everything SEED", "seed; 42 by default"),
        ("--print_config", "prints the config with every default, and ends; --print_config=skip_default without them"),
        ("--dry-run", "checks the run and describes it: ranks, mesh, memory, steps; starts nothing"),
        (HELP_ALL, "every key of the Trainer, with types and defaults"),
    ]
    summary = RUN_COMMANDS[command]
    lines = [f"usage: dlo {command} --config FILE [--KEY VALUE ...]", "", f"{summary[0].upper()}{summary[1:]}.", ""]
    for key, text in rows:
        lines += _format_row(key, text)
    examples = [f"dlo {command} --config quickstart", f"dlo {command} --config my.yaml --ckpt_path last"]
    return "\n".join([*lines, "", "examples:", *(f"  {example}" for example in examples)])


def _format_row(key: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, _WIDTH - _KEY - 2, break_on_hyphens=False)
    return [f"  {key if not number else '':<{_KEY - 1}} {line}" for number, line in enumerate(wrapped)]


def _names(registry: Registry, kind: str) -> list[str]:
    return [plugin.name for plugin in registry.plugins(kind)]


def _short_strategies(registry: Registry) -> list[str]:
    return [name for plugin in registry.plugins("strategy") for name in plugin.short_names]
