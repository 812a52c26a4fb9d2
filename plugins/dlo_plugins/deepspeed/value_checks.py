"""Checks of the values of a DeepSpeed configuration, by DeepSpeed's own classes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.nested_paths import drop_auto, get
from dlo_plugins.deepspeed.schema import Schema, import_config_module, known_keys, sections


def check_values(config: Mapping[str, Any], source: str) -> None:
    """Checks the values of the sections for which DeepSpeed has pydantic models, and that sections are mappings.

    ``"auto"`` means DeepSpeed's default, as in DeepSpeed itself.

    Raises:
        DloError: For the first invalid value, with its key and the rule.
    """
    for path, below in known_keys().items():
        value = config.get(path)
        if below is not None and value is not None and not isinstance(value, Mapping) and value is not False:
            raise DloError(f"{source}: {path} must be a section, such as {_example(path, below)}, got {value!r}")
    for path, model in sections().items():
        section = get(config, path)
        if isinstance(section, Mapping):
            _check_section(model, section, f"{source}: {path}")


def _example(path: str, below: Schema) -> str:
    return f'"{path}": {{"{next(iter(below), "key")}": ...}}'


def _check_section(model: Any, section: Mapping[str, Any], where: str) -> None:
    from pydantic import ValidationError

    try:
        model(**drop_auto(section))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join([where, *(str(key) for key in first["loc"])])
        message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        message = re.sub(r", (\w+) or \1$", r" or \1", message)  # DeepSpeed lists stage 3 twice.
        given = f", got {first['input']!r}" if first["loc"] else ""
        raise DloError(f"{path}: {message}{given}") from error
    except AssertionError as error:  # an old spelling beside its new one
        raise DloError(f"{where}: {error}; leave the old one out") from error


def check_whole(config: Mapping[str, Any], source: str) -> None:
    """Checks what DeepSpeed's own configuration class checks: top-level values, and combinations of sections.

    Builds DeepSpeed 0.19.8's ``DeepSpeedConfig``, which checks in its constructor.

    Args:
        config: DeepSpeed configuration. Its batch sizes are left out, because they are checked where the ranks are
            known, and so is ``aio``, which DeepSpeed checks against this machine, not the run's.
        source: Name of the configuration in messages.

    Raises:
        DloError: In DeepSpeed's words.
    """
    module = import_config_module()
    left_out = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "aio")
    content = {key: value for key, value in drop_auto(config).items() if key not in left_out}
    try:
        module.DeepSpeedConfig({**content, "train_micro_batch_size_per_gpu": 1})
    except (AssertionError, TypeError, ValueError, module.DeepSpeedConfigError) as error:
        raise DloError(f"{source}: DeepSpeed refuses the config: {error}") from error
