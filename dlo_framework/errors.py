"""Errors that users can fix: their messages hold the rule, the value, and the fix.

The command line prints a :class:`DloError` without a traceback and exits with code 2.
"""

from __future__ import annotations

import contextlib
import difflib
import operator
import re
from collections.abc import Iterable, Iterator, Sequence

#: Names that earlier versions had, in lower case, and what to use instead; docs/breaking.md has them too.
REMOVED = {
    "dualpipev": "use ZBV",
    "ahead": "a rank never leaves its schedule's order; leave it out",
    "overlaps": "a schedule runs its actions one after the other; leave it out",
    "mds": "write the shards again as tars in WebDataset's layout, or tokens in Megatron-LM's",
    "parquet": "write shards again as tars in WebDataset's layout; Parquet with text is read as `files`",
    "columns": "shards of images are tars in WebDataset's layout, which have no columns; leave it out",
    "embeddings": "tables of embeddings stay in float; leave it out",
    "check": "dlo plan no longer compares a run with its prediction; read the run's summary.json",
    "precompute": "set reference to a task with the initial weights, which each step computes",
    "own_processes": "trials run in the process, by predicted memory where ranks communicate; leave it out",
    "float8_all_gather": "leave it out; weights are gathered in their own dtype",
}


#: Characters of a list of names that is printed though the nearest one is known.
_LONGEST_LIST = 200


class DloError(ValueError):
    """Error in user input. The message holds the rule, the value, and the fix."""


class MissingInput(DloError):
    """A folder, file or model that this machine lacks; commands that need shapes alone go on without it.

    Args:
        message: Message for a run, which cannot.
        what: Path or name.
    """

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what


def nearest(name: str, options: Iterable[str]) -> str | None:
    """Returns the option most similar to ``name``, or None if none is similar."""
    # A YAML key may not be text: it reads `on:` as true.
    by_lower = {option.lower(): option for option in options}
    matches = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"``, or an empty string if no option is similar; of a removed name, what to use."""
    instead = REMOVED.get(str(name).lower())
    if instead is not None:
        return f"; removed in 0.2: {instead}."
    option = nearest(name, options)
    return f"; did you mean '{option}'?" if option else ""


def unknown_hint(name: str, options: Iterable[str], label: str = "available") -> str:
    """Returns the end of a message on an unknown name: the nearest one, and all if they are few or none is near.

    Args:
        name: Unknown name.
        options: Valid names.
        label: Words before the list.
    """
    names = list(options)
    near, listed = did_you_mean(name, names), ", ".join(names) or "none"
    if near and len(listed) > _LONGEST_LIST:
        return near
    return f"{near or ';'} {label}: {listed}"


#: Bound in the rule of a number, and its comparison.
_BOUND = re.compile(r"(at least|above|at most|below) (-?\d[\d.]*(?:e-?\d+)?)")
_COMPARISONS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def check_number(key: str, value: float | None, rule: str, fix: str = "") -> None:
    """Checks an option against the rule that the message prints; None, for an option that is not set, passes.

    Args:
        key: Name of the option, as in ``DiLoCo: period``.
        value: Number that was given. NaN follows no rule.
        rule: One or two bounds in words, such as ``above 0 and at most 1``; with other words around them or not.
        fix: Usual value, or what to do; may be empty.

    Raises:
        DloError: The number breaks the rule.
    """
    bounds = _BOUND.findall(rule)
    assert bounds, f"no bound in {rule!r}"
    if value is not None and not all(_COMPARISONS[words](value, float(bound)) for words, bound in bounds):
        raise DloError(f"{key} must be {rule}, got {value}" + (f"; {fix}" if fix else ""))


def check_choice(key: str, value: str | None, options: Iterable[str], fix: str = "") -> None:
    """Checks that an option is one of several words; None, for an option that is not set, passes.

    Args:
        key: Name of the option.
        value: Word that was given.
        options: Words that are allowed.
        fix: Remedy where no option is similar; may be empty.

    Raises:
        DloError: The word is none of them; the message has the nearest.
    """
    names = list(options)
    if value is not None and value not in names:
        near = did_you_mean(value, names)
        raise DloError(f"{key} must be one of {', '.join(names)}, got {value}{near}" + (f"; {fix}" if fix else ""))


def check_one_of(who: str, **options: object) -> None:
    """Checks that exactly one of several options is set, that is, not None.

    Args:
        who: Name of what has the options.
        **options: Values that were given, by name.

    Raises:
        DloError: None is set, or several are.
    """
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        fix = "leave out the others" if given else "set one"
        raise DloError(
            f"{who}: exactly one of {' and '.join(options)} must be set, got {' and '.join(given) or 'none'}; {fix}"
        )


def dlo_error_in(error: BaseException) -> DloError | None:
    """Returns the DloError that an error is, was raised from, or was raised while handling; None if there is none."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, DloError):
            return current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; its class where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


def worker_message(error: BaseException) -> str:
    """Returns an error's own message, also if a loader's worker has wrapped its traceback around it.

    torch re-raises a worker's exception as ``Type("Caught Type in DataLoader worker process 0.\\nOriginal Traceback
    ...\\npackage.Type: message")``; the user's message follows the last type name.
    """
    text = str(error)
    if "Original Traceback" not in text:
        return text
    return text.rsplit(f"{type(error).__name__}: ", 1)[-1].strip()


class OrderlyEnd(Exception):
    """End of a run that all ranks reach at the same point, without a failure."""


def mark_agreed(error: Exception) -> Exception:
    """Marks an error as raised by all ranks at the same point, so that it is not taken for one rank's failure."""
    error.__dict__["all_ranks_agree"] = True
    return error


@contextlib.contextmanager
def agreed_errors() -> Iterator[None]:
    """Marks the DloError that a block or a function raises as raised by all ranks; see :func:`mark_agreed`."""
    try:
        yield
    except DloError as error:
        mark_agreed(error)
        raise


def is_agreed(error: BaseException) -> bool:
    """Returns whether all ranks raise this error at the same point."""
    return isinstance(error, OrderlyEnd) or bool(getattr(error, "all_ranks_agree", False))


def shown_names(names: Sequence[str]) -> str:
    """Returns the first five names as text, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
