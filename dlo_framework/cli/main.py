"""Entry point of ``dlo``: dispatches on the command and imports only what that command needs."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from dlo_framework._version import __version__
from dlo_framework.cli.launcher_args import translate_launcher_args
from dlo_framework.errors import DloError, did_you_mean, worker_message

RUN_COMMANDS = {
    "fit": "train a model, validating as it goes",
    "validate": "evaluate a checkpoint on the validation data",
    "test": "evaluate a checkpoint on the test data",
    "predict": "run a checkpoint on data without targets",
}
OTHER_COMMANDS = {
    "lr-find": "try learning rates before a training, and suggest one",
    "checkpoint": "show, check, convert or export a checkpoint",
    "mesh": "draw which rank holds which shards of a model, without starting a process",
    "deepspeed-config": "translate a config to a DeepSpeed JSON, or a DeepSpeed JSON to a config",
    "parity": "train on several ranks and as one process, and compare step by step",
    "plugins": "list the plug-ins, show one, or write a new one",
    "configs": "list the shipped configs, or print one",
}

HELP = """usage: dlo COMMAND [options]

Plug-ins for training large models on Lightning, each switched on by one line of YAML.

commands:
{commands}

options:
  -h, --help   show this text; `dlo COMMAND --help` shows the options of a command
  --version    show the versions of dlo and of the libraries it uses

examples:
  dlo fit --config quickstart
  dlo fit --config my.yaml --trainer.max_epochs 5
  dlo fit --config my.yaml --ckpt_path last
  dlo validate --config my.yaml --ckpt_path best
  dlo lr-find --config my.yaml
  dlo mesh --config my.yaml --ranks 16
  dlo parity --config my.yaml --devices 2 --trainer.strategy ddp
  dlo deepspeed-config ds.json
  dlo plugins show OneCycle"""


def main(argv: list[str] | None = None) -> int:
    """Runs ``dlo``.

    Args:
        argv: Arguments after ``dlo``; None reads ``sys.argv``.

    Returns:
        Exit code: 0 on success, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM.
    """
    if argv is None and sys.stderr is not None:
        faulthandler.enable()  # A crash in native code prints the Python line that led to it.
    words = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(translate_launcher_args(words, os.environ))
    except DloError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return _interrupted(own_process=argv is None)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning ends the process with 1 on it.
            return _interrupted(own_process=argv is None)
        raise
    except BrokenPipeError:
        # The reader of stdout has ended: harmless for `dlo plugins | head`, but a training was cut short.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE if words and words[0] in RUN_COMMANDS else 0


def _dispatch(words: list[str]) -> int:
    command = words[0] if words else "--help"
    if command in ("-h", "--help"):
        commands = RUN_COMMANDS | OTHER_COMMANDS
        width = max(map(len, commands))
        print(HELP.format(commands="\n".join(f"  {name:<{width}}  {text}" for name, text in commands.items())))
        return 0
    if command == "--version":
        from dlo_framework.versions import format_versions

        print(format_versions())
        return 0
    if command == "plugins":
        from dlo_framework.cli import plugins_command

        return plugins_command.main(words[1:])
    if command == "checkpoint":
        from dlo_framework.cli import checkpoint_command

        return checkpoint_command.main(words[1:])
    if command == "configs":
        from dlo_framework.cli import configs_command

        return configs_command.main(words[1:])
    if command == "mesh":
        from dlo_framework.cli import mesh_command

        return mesh_command.main(words[1:])
    if command == "deepspeed-config":
        from dlo_framework.cli import deepspeed_config_command

        return deepspeed_config_command.main(words[1:])
    if command == "parity":
        from dlo_framework.cli import parity_command

        return parity_command.main(words[1:])
    if command in RUN_COMMANDS or command == "lr-find":
        from dlo_framework.cli.run import run

        return run(words)
    known = [*RUN_COMMANDS, *OTHER_COMMANDS]
    raise DloError(f"unknown command '{command}'{did_you_mean(command, known) or ';'} available: {', '.join(known)}")


def _interrupted(*, own_process: bool) -> int:
    """Reports Ctrl-C. A dlo process that has imported torch ends here, because an orderly exit takes seconds."""
    print(f"dlo {__version__}: interrupted; checkpoints saved before the interrupt are complete", file=sys.stderr)
    code = 128 + signal.SIGINT
    failure = sys.modules.get("dlo_framework.distributed.failure")
    if own_process and failure is not None:
        failure.exit_process(code)
    return code


def _refuse(error: DloError) -> int:
    message = worker_message(error)
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")
    where = f" (rank {rank})" if rank not in (None, "0") else ""
    print(f"dlo {__version__}: error{where}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
