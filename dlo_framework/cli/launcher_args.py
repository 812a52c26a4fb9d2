"""Arguments that launchers and other tools' scripts add to a command line.

A launcher may start a script as ``dlo --local_rank=1 fit ...``, with the same number in the environment. Job files for
other tools contain options of those tools; a plug-in translates them, by an entry point in the group
``dlo_framework.options``. Its name is the option; its function takes the option's value, empty if there is none, and
returns dlo's options by name::

    dlo_framework.options =
        other_config = my_package.options:use_other_config
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dlo_framework.errors import DloError
from dlo_framework.extensions import format_origin, installed_points, load_function

GROUP = "dlo_framework.options"

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


def translate_options(options: Iterable[tuple[str, str | None]]) -> Iterator[tuple[str, str | None]]:
    """Yields (option, value) pairs, with the options that plug-ins translate replaced by dlo's own.

    Raises:
        DloError: If two packages have an option, its function cannot be imported, or the function refuses the value.
    """
    points = installed_points().select(group=GROUP)
    for option, value in options:
        found = [point for point in points if option == f"--{point.name}"]
        if len(found) > 1:
            origins = " and in ".join(sorted(map(format_origin, found)))
            raise DloError(f"option names must be unique, got '{option}' in {origins}; uninstall one")
        if found:
            yield from load_function(found[0], "option")(value or "").items()
        else:
            yield option, value
