"""The entry point of ``dlo``: it looks at the first word and imports only what that word needs."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from dlo_framework._version import __version__
from dlo_framework.cli.launched import own_words
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
    "mesh": "draw which rank holds what of a model, without starting any",
    "deepspeed-config": "print the DeepSpeed JSON of a config, or the config of a DeepSpeed JSON",
    "parity": "train on several ranks and as one process, and compare the two step by step",
    "plugins": "list the plug-ins, show one, or write a new one",
    "configs": "list the shipped configs, or print one",
}

HELP = """usage: dlo COMMAND [options]

Plug-ins for training large models on Lightning, each switched on by one line of YAML.

commands:
{commands}

options:
  -h, --help   this text; `dlo COMMAND --help` has the options of a command
  --version    the versions of dlo and of everything under it

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
        argv: the words after ``dlo``; the process's own where None.

    Returns:
        The exit code: 0 on success, 2 for bad input, 130 and 143 after Ctrl-C and SIGTERM.
    """
    if argv is None and sys.stderr is not None:
        faulthandler.enable()  # A crash in torch or below says which line of Python led to it.
    words = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(own_words(words, os.environ))
    except DloError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return _interrupted(own_process=argv is None)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning ends the process with 1 on it.
            return _interrupted(own_process=argv is None)
        raise
    except BrokenPipeError:
        # The reader of our output has gone. For `dlo plugins | head` that is no error; it has cut a training short.
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
    """Reports Ctrl-C. A process of dlo's own that has imported torch ends here: an orderly exit takes seconds."""
    print(f"dlo {__version__}: interrupted at once; what was saved before is whole", file=sys.stderr)
    code = 128 + signal.SIGINT
    failure = sys.modules.get("dlo_framework.distributed.failure")
    if own_process and failure is not None:
        failure.leave(code)
    return code


def _refuse(error: DloError) -> int:
    message = worker_message(error)
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")
    where = f" (rank {rank})" if rank not in (None, "0") else ""
    print(f"dlo {__version__}: error{where}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
