"""DeepSpeed's configuration from the bridge's typed options, a JSON of the user's, and the Trainer's settings.

What two of them set must be equal; what only one sets is taken. The order of things: :func:`resolve` when the
strategy is built, before a process starts; :func:`with_trainer` once the Trainer is known;
``requirements.check_available`` on the machine that the run is on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed import json_file
from dlo_plugins.deepspeed.batch import with_batch_size
from dlo_plugins.deepspeed.consistency import check_consistent
from dlo_plugins.deepspeed.facts import TrainerFacts
from dlo_plugins.deepspeed.optimizers import check_optimizer, optimizer_of
from dlo_plugins.deepspeed.options import to_values
from dlo_plugins.deepspeed.paths import get, put, stage_of
from dlo_plugins.deepspeed.precision import check_precision, with_clipping, with_precision
from dlo_plugins.deepspeed.removed import check_removed
from dlo_plugins.deepspeed.schedules import check_scheduler, lengths_of, scheduler_of
from dlo_plugins.deepspeed.schema import check_keys
from dlo_plugins.deepspeed.values import check_values, check_whole

__all__ = [
    "DeepSpeedJson",
    "TrainerFacts",
    "lengths_of",
    "optimizer_of",
    "resolve",
    "scheduler_of",
    "source_of",
    "with_trainer",
]

#: The stage where neither an option nor a JSON says one: what most runs want of DeepSpeed.
DEFAULT_STAGE = 2


class DeepSpeedJson(dict[str, Any]):
    """A DeepSpeed configuration that knows what messages call it.

    Attributes:
        source: the file that it came from, or ``strategy.config``.
    """

    def __init__(self, content: Mapping[str, Any], source: str = json_file.INLINE) -> None:
        super().__init__(content)
        self.source = source

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepSpeedJson:
        return DeepSpeedJson(copy.deepcopy(dict(self), memo), self.source)


def source_of(config: Mapping[str, Any]) -> str:
    """Returns what messages call a configuration."""
    return getattr(config, "source", json_file.INLINE)


def resolve(options: Mapping[str, Any], config: str | Path | Mapping[str, Any] | None = None) -> DeepSpeedJson:
    """Returns one DeepSpeed configuration from the bridge's typed options and a JSON.

    Old spellings that DeepSpeed still takes become the new ones. Values of ``"auto"`` stay, for :func:`with_trainer`.
    Without a stage in the options, and without a JSON, the stage is 2.

    Args:
        options: DeepSpeedBridge's arguments by name; those that are None are not set.
        config: a JSON file, or its content.

    Raises:
        DloError: for a file that does not parse, an unknown key, a value that does not fit, a feature that is gone,
            what both set to different values, and what DeepSpeed cannot combine.
    """
    content, source = json_file.read(config)
    check_removed(content, source)
    check_keys(content, source)
    content = modernised(content, source)
    result = DeepSpeedJson(content, source)
    for path, (option, value) in to_values(options, content).items():
        given = get(content, path, "auto")
        if given not in ("auto", value):
            raise DloError(
                f"{source} says {path} {_shown(given)}, the strategy's option {option} says {_shown(value)}; set it in"
                f" one place: leave {option} out, or the key"
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


def with_trainer(config: Mapping[str, Any], facts: TrainerFacts) -> DeepSpeedJson:
    """Returns a configuration with all that the Trainer sets too: batch size, accumulation, clipping, precision.

    What is ``"auto"`` or absent is filled from the Trainer. Without ``gradient_clipping`` in either, clipping is off:
    DeepSpeed's own default is a norm of 1.0. Without a stage it is 0, as in DeepSpeed.

    Args:
        config: what :func:`resolve` returned.
        facts: what the Trainer says.

    Raises:
        DloError: for what both set to different values, and for what DeepSpeed cannot do.
    """
    source = source_of(config)
    result = DeepSpeedJson(copy.deepcopy(dict(config)), source)
    with_batch_size(result, facts, source)
    with_clipping(result, facts, source)
    with_precision(result, facts, source)
    put(result, "zero_optimization.stage", stage_of(result))
    for key in [key for key, value in result.items() if value == "auto"]:
        del result[key]  # DeepSpeed takes "auto" inside its sections for their defaults, but not at the top.
    return result


def modernised(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns a configuration with DeepSpeed's old spellings in the new ones.

    Raises:
        DloError: where both stand, with different values.
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
                raise DloError(f"{source}: zero_optimization.{old} is true or false, but was {_shown(on)}")
            _rename(zero, old, new, {"device": "cpu"} if on else None, f"{source}: zero_optimization")
    old = "stage3_gather_fp16_weights_on_model_save"
    if old in zero:
        _rename(zero, old, "stage3_gather_16bit_weights_on_model_save", zero[old], f"{source}: zero_optimization")
    return result


def _rename(section: dict[str, Any], old: str, new: str, value: Any, where: str) -> None:
    given = section.get(new, value)
    if value is not None and given != value:
        raise DloError(
            f"{where}: {old}, an old spelling, means {new} {_shown(value)}, but {new} is {_shown(given)}; leave {old}"
            " out"
        )
    del section[old]
    if given is not None:
        section[new] = given


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
