"""Translation of the arguments that launchers and DeepSpeed scripts add to a command line.

DeepSpeed's launcher starts a script as ``dlo --local_rank=1 fit ...``, with the same number in the environment. Scripts
for DeepSpeed take ``--deepspeed --deepspeed_config ds.json``, which ``deepspeed.add_config_arguments`` defines, so job
files contain them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dlo_framework.errors import DloError

#: Short name of the strategy that reads a DeepSpeed JSON.
BRIDGE = "DeepSpeedBridge"

_LOCAL_RANK = ("--local_rank", "--local-rank")
_SWITCH, _CONFIG = "--deepspeed", "--deepspeed_config"


def translate_launcher_args(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Returns a command line without a launcher's arguments, and with DeepSpeed's arguments translated to dlo's.

    Args:
        words: Arguments after ``dlo``.
        environment: Environment variables, in which launchers set the rank too.

    Raises:
        DloError: If the local rank is missing from the environment or differs from it, or a config has no file.
    """
    result: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, _, value = word.partition("=")
        if name in _LOCAL_RANK:
            _check_rank(value or next(remaining, ""), environment)
        elif name == _CONFIG:
            result += _strategy(value or next(remaining, ""))
        elif word != _SWITCH:
            result.append(word)
    return result


def _check_rank(given: str, environment: Mapping[str, str]) -> None:
    known = environment.get("LOCAL_RANK")
    if known is None:
        raise DloError(
            f"--local_rank must come from a launcher that sets LOCAL_RANK, got {given} without it; start dlo with"
            " `deepspeed` or `torchrun`, or remove --local_rank and set --trainer.devices"
        )
    if given != known:
        raise DloError(f"--local_rank must equal LOCAL_RANK {known}, got {given}; remove --local_rank")


def _strategy(file: str) -> Iterator[str]:
    if not file or file.startswith("-"):
        raise DloError(f"{_CONFIG} must be a DeepSpeed JSON, got {file or 'nothing'}; write {_CONFIG} ds.json")
    yield from ("--trainer.strategy.class_path", BRIDGE, "--trainer.strategy.init_args.config", file)
