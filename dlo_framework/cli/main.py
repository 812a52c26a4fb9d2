"""Entry point of ``dlo``: dispatches on the command and imports only what that command needs."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from dlo_framework._version import __version__
from dlo_framework.cli.command_table import (
    ENGINE,
    HELP_ALL,
    HELP_WORDS,
    RUN_COMMANDS,
    format_commands,
    format_first_commands,
    format_run_help,
    load_command,
    load_engine,
)
from dlo_framework.cli.config_scan import translate_options
from dlo_framework.errors import DloError, worker_message
from dlo_framework.run.process import INTERRUPTED_CODE, INTERRUPTED_MESSAGE

HELP = """usage: dlo COMMAND [options]; `dlo COMMAND --help` shows them

Plug-ins for training large models on Lightning, each switched on by one line of YAML.

{commands}

begin with:
  dlo fit --config quickstart
  dlo parity --config quickstart --devices 2 --trainer.strategy zero2"""

HELP_ALL_COMMANDS = """usage: dlo COMMAND [options]; `dlo COMMAND --help` shows them

{commands}

examples:
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
    if command in HELP_WORDS:
        print(HELP.format(commands=format_first_commands()))
        return 0
    if command == HELP_ALL:
        commands, examples = format_commands()
        print(HELP_ALL_COMMANDS.format(commands=commands, examples=examples))
        return 0
    if command == "--version":
        from dlo_framework.extensions import format_versions

        print(format_versions())
        return 0
    if command in RUN_COMMANDS and any(word in HELP_WORDS for word in words):
        print(format_run_help(command))
        return 0
    if command == "fit" and any(word.partition("=")[0] == ENGINE for word in words):
        engine, rest = load_engine(words)
        return engine(rest)
    if command in RUN_COMMANDS:
        from dlo_framework.cli.run import run

        return run(words)
    if command.startswith("-"):  # Another tool's script may have its options before the command.
        translated = [word for pair in translate_options([(command, None)]) for word in pair if word]
        if translated != [command]:
            return _dispatch([*words[1:], *translated])
    return load_command(command)(words[1:]) or 0


_LOCAL_RANK = ("--local_rank", "--local-rank")


def remove_local_rank(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Returns a command line without a launcher's ``--local_rank``.

    Args:
        words: Arguments after ``dlo``.
        environment: Environment variables, in which launchers set the rank too.

    Raises:
        DloError: If the local rank is missing from the environment or differs from it.
    """
    result: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, _, value = word.partition("=")
        if name in _LOCAL_RANK:
            _check_rank(value or next(remaining, ""), environment)
        else:
            result.append(word)
    return result


def _check_rank(given: str, environment: Mapping[str, str]) -> None:
    known = environment.get("LOCAL_RANK")
    if known is None:
        raise DloError(
            f"--local_rank must come from a launcher that sets LOCAL_RANK, got {given} without it; start dlo with"
            " `torchrun` or another launcher, or remove --local_rank and set --trainer.devices"
        )
    if given != known:
        raise DloError(f"--local_rank must equal LOCAL_RANK {known}, got {given}; remove --local_rank")


def _interrupted(*, own_process: bool) -> int:
    """Reports Ctrl-C. A dlo process ends here: an orderly exit takes seconds, and crashes after half an import."""
    print(INTERRUPTED_MESSAGE, file=sys.stderr)
    failure = sys.modules.get("dlo_framework.distributed.failure")
    if own_process and failure is not None:
        failure.exit_process(INTERRUPTED_CODE)
    if own_process:
        os._exit(INTERRUPTED_CODE)
    return INTERRUPTED_CODE


def _refuse(error: DloError) -> int:
    message = worker_message(error)
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")
    where = f" (rank {rank})" if rank not in (None, "0") else ""
    print(f"dlo {__version__}: error{where}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
