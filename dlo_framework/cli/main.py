"""Entry point of ``dlo``: dispatches on the command and imports only what that command needs."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from dlo_framework._version import __version__
from dlo_framework.cli.command_table import RUN_COMMANDS, format_commands, load_command
from dlo_framework.cli.launcher_args import remove_local_rank, translate_options
from dlo_framework.cli.run_help import HELP as HELP_WORDS
from dlo_framework.cli.run_help import format_run_help
from dlo_framework.errors import DloError, worker_message
from dlo_framework.interrupts import CODE, MESSAGE

HELP = """usage: dlo COMMAND [options]

Plug-ins for training large models on Lightning, each switched on by one line of YAML.

commands:
{commands}

options:
  -h, --help   show this text; `dlo COMMAND --help` shows the options of a command, `dlo fit --help-all` every key
  --version    show the versions of dlo and of the libraries it uses

examples:
  dlo fit --config quickstart
  dlo fit --config my.yaml --trainer.max_epochs 5
  dlo fit --config my.yaml --ckpt_path last
  dlo validate --config my.yaml --ckpt_path best
  dlo parity --config my.yaml --devices 2 --trainer.strategy ddp
  dlo plugins show WeightEMA
{examples}"""


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
        return _dispatch(remove_local_rank(words, os.environ))
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
        commands, examples = format_commands()
        print(HELP.format(commands=commands, examples=examples).rstrip())
        return 0
    if command == "--version":
        from dlo_framework.versions import format_versions

        print(format_versions())
        return 0
    if command in RUN_COMMANDS and any(word in HELP_WORDS for word in words):
        print(format_run_help(command))
        return 0
    if command in RUN_COMMANDS:
        from dlo_framework.cli.run import run

        return run(words)
    if command.startswith("-"):  # Another tool's script may have its options before the command.
        translated = [word for pair in translate_options([(command, None)]) for word in pair if word]
        if translated != [command]:
            return _dispatch([*words[1:], *translated])
    return load_command(command)(words[1:]) or 0


def _interrupted(*, own_process: bool) -> int:
    """Reports Ctrl-C. A dlo process ends here: an orderly exit takes seconds, and crashes after half an import."""
    print(MESSAGE, file=sys.stderr)
    failure = sys.modules.get("dlo_framework.distributed.failure")
    if own_process and failure is not None:
        failure.exit_process(CODE)
    if own_process:
        os._exit(CODE)
    return CODE


def _refuse(error: DloError) -> int:
    message = worker_message(error)
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")
    where = f" (rank {rank})" if rank not in (None, "0") else ""
    print(f"dlo {__version__}: error{where}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
