"""Translation of a JSON's optimizer and scheduler to options of dlo's own tasks, for users who drop the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_plugins.deepspeed.json_optimizers import make_optimizer_args
from dlo_plugins.deepspeed.nested_paths import drop_auto, get

#: timm's names of torch's classes where they differ; the tasks use timm's names.
_NAMES = {"NAdam": "nadam", "RAdam": "radam", "RMSprop": "rmsprop"}


def task_options(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the nearest `init_args` of CausalLM or ImageClassifier, and notes on how they differ.

    Args:
        config: Configuration that ``resolve`` returned.
    """
    options, notes = _optimizer(config)
    schedule, more = _schedule(config, options.get("lr"))
    return {**options, **schedule}, notes + more


def _optimizer(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    found = make_optimizer_args(drop_auto(config))
    if found is None:
        return {}, []
    cls, arguments = found
    open_ones = [key for key, value in (get(config, "optimizer.params") or {}).items() if value == "auto"]
    left_out = (*open_ones, "foreach", "always_adapt")
    arguments = {key: value for key, value in arguments.items() if key not in left_out}
    name = _NAMES.get(cls.__name__, cls.__name__.lower())
    if name == "sgd":  # timm's `sgd` has Nesterov momentum.
        name = "sgd" if arguments.pop("nesterov", False) else "momentum"
    arguments.pop("max_grad_norm", None)
    options: dict[str, Any] = {"optimizer": name}
    options |= {key: arguments.pop(key) for key in ("lr", "weight_decay") if key in arguments}
    if arguments:
        options["optimizer_args"] = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items()}
    notes = ["the tasks apply no weight decay to norms and biases"] if options.get("weight_decay") else []
    return options, notes


def _schedule(config: Mapping[str, Any], lr: float | None) -> tuple[dict[str, Any], list[str]]:
    name, params = get(config, "scheduler.type"), get(config, "scheduler.params") or {}
    steps, given = params.get("warmup_num_steps", 1000), drop_auto(params)
    warm = {} if steps == "auto" else {"warmup_steps": steps}
    notes = []
    if name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR") and given.get("warmup_type", "log") == "log":
        notes.append(f"{name} warms up logarithmically, the tasks linearly")
    if name == "WarmupDecayLR":
        ends = {"warmup_lr": given["warmup_min_lr"]} if given.get("warmup_min_lr") else {}
        peak = {"lr": given["warmup_max_lr"]} if isinstance(given.get("warmup_max_lr"), int | float) else {}
        return {**peak, "schedule": "linear", **warm, **ends}, [*notes, *_end(given)]
    if name == "WarmupCosineLR":
        floor = {"min_lr": lr * given.get("cos_min_ratio", 0.0001)} if lr else {}
        ends = {"warmup_lr": lr * given["warmup_min_ratio"]} if lr and given.get("warmup_min_ratio") else {}
        return {"schedule": "cosine", **warm, **ends, **floor}, [*notes, *_end(given)]
    if name == "WarmupLR":
        return {"schedule": "constant"}, [*notes, "the constant schedule of the tasks has no warm-up"]
    if name == "OneCycle":
        return {"schedule": "constant"}, ["with the callback OneCycle, which decays along its own curve"]
    if name == "LRRangeTest":
        return {"schedule": "constant"}, ["`dlo lr-find` is the range test"]
    return {}, [f"{name} has no counterpart"] if name else []


def _end(given: Mapping[str, Any]) -> list[str]:
    steps = given.get("total_num_steps")
    return [f"the schedule ends with the run: trainer.max_steps: {steps}"] if isinstance(steps, int) else []
