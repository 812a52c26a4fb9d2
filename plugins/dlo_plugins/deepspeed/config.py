"""DeepSpeed's configuration, merged from the bridge's typed options, a user's JSON, and the Trainer's settings.

A value that two of them set must be equal; a value that one sets is used. :func:`merge_options` runs when the
strategy is built, before a process starts; :func:`fill_from_trainer` once the Trainer is known;
``machine_requirements.check_available`` on the machine of the run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed import json_file
from dlo_plugins.deepspeed.batch_settings import fill_batch_size
from dlo_plugins.deepspeed.consistency import check_consistent
from dlo_plugins.deepspeed.json_optimizers import check_optimizer, make_optimizer_args
from dlo_plugins.deepspeed.json_precision import check_precision, fill_clipping, fill_precision
from dlo_plugins.deepspeed.json_schedules import build_scheduler, check_scheduler, compute_lengths
from dlo_plugins.deepspeed.nested_paths import get, get_stage, put
from dlo_plugins.deepspeed.options import to_values
from dlo_plugins.deepspeed.removed_features import check_removed
from dlo_plugins.deepspeed.schema import check_keys
from dlo_plugins.deepspeed.trainer_settings import TrainerSettings
from dlo_plugins.deepspeed.value_checks import check_values, check_whole

__all__ = [
    "DeepSpeedJson",
    "TrainerSettings",
    "build_scheduler",
    "compute_lengths",
    "fill_from_trainer",
    "get_source",
    "make_optimizer_args",
    "merge_options",
]

#: ZeRO stage if neither an option nor a JSON sets one; the stage that most DeepSpeed runs use.
DEFAULT_STAGE = 2


class DeepSpeedJson(dict[str, Any]):
    """A DeepSpeed configuration with the name that messages use for it.

    Attributes:
        source: Path of the file it was read from, or ``strategy.config``.
    """

    def __init__(self, content: Mapping[str, Any], source: str = json_file.INLINE) -> None:
        super().__init__(content)
        self.source = source

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepSpeedJson:
        return DeepSpeedJson(copy.deepcopy(dict(self), memo), self.source)


def get_source(config: Mapping[str, Any]) -> str:
    """Returns the name that messages use for a configuration."""
    return getattr(config, "source", json_file.INLINE)


def merge_options(options: Mapping[str, Any], config: str | Path | Mapping[str, Any] | None = None) -> DeepSpeedJson:
    """Returns one DeepSpeed configuration from the bridge's typed options and a JSON.

    Old spellings that DeepSpeed still accepts become the new ones. Values of ``"auto"`` stay, for
    :func:`fill_from_trainer`. If neither the options nor a JSON set a stage, it is 2.

    Args:
        options: Arguments of DeepSpeedBridge by name; those that are None are not set.
        config: Path of a JSON file, or its content.

    Raises:
        DloError: If a file does not parse, a key is unknown or removed, a value is invalid, options and JSON differ, or
            DeepSpeed cannot combine two settings.
    """
    content, source = json_file.read_json(config)
    check_removed(content, source)
    check_keys(content, source)
    content = replace_old_keys(content, source)
    result = DeepSpeedJson(content, source)
    for path, (option, value) in to_values(options, content).items():
        given = get(content, path, "auto")
        if given not in ("auto", value):
            raise DloError(
                f"{source}: {path} must equal the strategy's option {option} {_shown(value)}, got {_shown(given)}; set"
                f" it in one place: leave out {option} or the key"
            )
        put(result, path, value)
    if config is None and get(result, "zero_optimization.stage") is None:
        put(result, "zero_optimization.stage", DEFAULT_STAGE)
    check_values(result, source)
    check_precision(result, source)
    check_consistent(result, source)
    check_optimizer(result, source)
    check_scheduler(result, source)
    check_whole(result, source)
    return result


def fill_from_trainer(config: Mapping[str, Any], facts: TrainerSettings) -> DeepSpeedJson:
    """Returns a configuration completed with the Trainer's settings: batch size, accumulation, clipping, precision.

    ``"auto"`` and missing values are filled in from the Trainer. Without ``gradient_clipping`` in either, clipping is
    off (DeepSpeed's own default is a norm of 1.0). Without a stage it is 0, as in DeepSpeed.

    Args:
        config: Configuration that :func:`merge_options` returned.
        facts: Settings of the Trainer.

    Raises:
        DloError: If both set different values, or DeepSpeed does not support a setting.
    """
    source = get_source(config)
    result = DeepSpeedJson(copy.deepcopy(dict(config)), source)
    fill_batch_size(result, facts, source)
    fill_clipping(result, facts, source)
    fill_precision(result, facts, source)
    put(result, "zero_optimization.stage", get_stage(result))
    for key in [key for key, value in result.items() if value == "auto"]:
        del result[key]  # DeepSpeed reads "auto" as the default inside sections, but not at the top level.
    return result


def replace_old_keys(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns a configuration with DeepSpeed's old spellings replaced by the new ones.

    Raises:
        DloError: If both spellings are set to different values.
    """
    result: dict[str, Any] = copy.deepcopy(dict(config))
    zero = result.get("zero_optimization")
    if isinstance(zero, bool):
        result["zero_optimization"] = zero = {"stage": int(zero)}
        if "allgather_size" in result:
            zero["allgather_bucket_size"] = result.pop("allgather_size")
    if "bfloat16" in result:
        _rename(result, "bfloat16", "bf16", result["bfloat16"], source)
    if not isinstance(zero, dict):
        return result
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old in zero:
            on = zero[old]
            if not isinstance(on, bool | None):
                raise DloError(f"{source}: zero_optimization.{old} must be true or false, got {_shown(on)}")
            _rename(zero, old, new, {"device": "cpu"} if on else None, f"{source}: zero_optimization")
    old = "stage3_gather_fp16_weights_on_model_save"
    if old in zero:
        _rename(zero, old, "stage3_gather_16bit_weights_on_model_save", zero[old], f"{source}: zero_optimization")
    return result


def _rename(section: dict[str, Any], old: str, new: str, value: Any, where: str) -> None:
    given = section.get(new, value)
    if value is not None and given != value:
        raise DloError(
            f"{where}: {new} must equal {_shown(value)}, which its old spelling {old} means, got {_shown(given)}; leave"
            f" out {old}"
        )
    del section[old]
    if given is not None:
        section[new] = given


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
