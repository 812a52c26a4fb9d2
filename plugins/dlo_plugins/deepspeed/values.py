"""Whether the values of a DeepSpeed configuration fit, as DeepSpeed's own classes have it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.paths import get, without_auto
from dlo_plugins.deepspeed.schema import Schema, import_config_module, known_keys, sections


def check_values(config: Mapping[str, Any], source: str) -> None:
    """Checks the values of the sections that DeepSpeed has pydantic models for, and that sections are mappings.

    Values of ``"auto"`` are DeepSpeed's defaults, as it takes them itself.

    Raises:
        DloError: for the first value that does not fit: its key, the rule and what was given.
    """
    for path, below in known_keys().items():
        value = config.get(path)
        if below is not None and value is not None and not isinstance(value, Mapping) and value is not False:
            raise DloError(f"{source}: {path} is a section, such as {_example(path, below)}, but was {value!r}")
    for path, model in sections().items():
        section = get(config, path)
        if isinstance(section, Mapping):
            _check_section(model, section, f"{source}: {path}")


def _example(path: str, below: Schema) -> str:
    return f'"{path}": {{"{next(iter(below), "key")}": ...}}'


def _check_section(model: Any, section: Mapping[str, Any], where: str) -> None:
    from pydantic import ValidationError

    try:
        model(**without_auto(section))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join([where, *(str(part) for part in first["loc"])])
        message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        message = re.sub(r", (\w+) or \1$", r" or \1", message)  # DeepSpeed's stages end in `max_stage`, a second 3.
        given = f", but was {first['input']!r}" if first["loc"] else ""
        raise DloError(f"{path}: {message}{given}") from error
    except AssertionError as error:  # an old spelling beside its new one
        raise DloError(f"{where}: {error}; leave the old one out") from error


def check_whole(config: Mapping[str, Any], source: str) -> None:
    """Checks what DeepSpeed's own configuration class checks: values of the top level, and sections together.

    A reach into DeepSpeed 0.19.8, whose ``DeepSpeedConfig`` checks as it is built.

    Args:
        config: its batch sizes are left out: they are checked where the ranks are known; so is ``aio``, which DeepSpeed
            checks against this machine, and the run's may be another.
        source: what the message calls it.

    Raises:
        DloError: in DeepSpeed's words.
    """
    module = import_config_module()
    left_out = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "aio")
    content = {key: value for key, value in without_auto(config).items() if key not in left_out}
    try:
        module.DeepSpeedConfig({**content, "train_micro_batch_size_per_gpu": 1})
    except (AssertionError, TypeError, ValueError, module.DeepSpeedConfigError) as error:
        raise DloError(f"{source}: DeepSpeed refuses it: {error}") from error
