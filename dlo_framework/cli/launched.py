"""The words that a launcher adds to a command, or that scripts for DeepSpeed take.

DeepSpeed's launcher starts a script as ``dlo --local_rank=1 fit ...``, with the same number in the environment. Scripts
for DeepSpeed take ``--deepspeed --deepspeed_config ds.json``, which ``deepspeed.add_config_arguments`` defines: people
have them in their habits and in their job files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dlo_framework.errors import DloError

#: The strategy that reads a DeepSpeed JSON, by its short name.
BRIDGE = "DeepSpeedBridge"

_LOCAL_RANK = ("--local_rank", "--local-rank")
_SWITCH, _CONFIG = "--deepspeed", "--deepspeed_config"


def own_words(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Returns a command without a launcher's words, and with DeepSpeed's in dlo's own.

    Args:
        words: after ``dlo``.
        environment: where launchers say the rank too.

    Raises:
        DloError: for a local rank that the environment does not have, or has otherwise, and a config without a file.
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
            f"--local_rank {given} is a launcher's word, but LOCAL_RANK is not set: start dlo by `deepspeed` or"
            " `torchrun`, which set it, or leave the word out and set --trainer.devices"
        )
    if given != known:
        raise DloError(f"--local_rank is {given}, but LOCAL_RANK is {known}; leave --local_rank out")


def _strategy(file: str) -> Iterator[str]:
    if not file or file.startswith("-"):
        raise DloError(f"{_CONFIG} needs a DeepSpeed JSON: {_CONFIG} ds.json")
    yield from ("--trainer.strategy.class_path", BRIDGE, "--trainer.strategy.init_args.config", file)
