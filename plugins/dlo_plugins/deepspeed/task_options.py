"""What a JSON's optimizer and scheduler would be as options of dlo's own tasks, for those who leave the JSON behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_plugins.deepspeed.optimizers import optimizer_of
from dlo_plugins.deepspeed.paths import get, without_auto

#: timm's names, which the tasks take, of torch's classes where they differ.
_NAMES = {"NAdam": "nadam", "RAdam": "radam", "RMSprop": "rmsprop"}


def task_options(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the `init_args` of CausalLM or ImageClassifier that come nearest, and what they do otherwise.

    Args:
        config: what ``resolve`` returned.
    """
    options, notes = _optimizer(config)
    schedule, more = _schedule(config, options.get("lr"))
    return {**options, **schedule}, notes + more


def _optimizer(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    found = optimizer_of(without_auto(config))
    if found is None:
        return {}, []
    cls, arguments = found
    open_ones = [key for key, value in (get(config, "optimizer.params") or {}).items() if value == "auto"]
    left_out = (*open_ones, "foreach", "always_adapt")
    arguments = {key: value for key, value in arguments.items() if key not in left_out}
    name = _NAMES.get(cls.__name__, cls.__name__.lower())
    if name == "sgd":  # timm's `sgd` is Nesterov's.
        name = "sgd" if arguments.pop("nesterov", False) else "momentum"
    arguments.pop("max_grad_norm", None)
    options: dict[str, Any] = {"optimizer": name}
    options |= {key: arguments.pop(key) for key in ("lr", "weight_decay") if key in arguments}
    if arguments:
        options["optimizer_args"] = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items()}
    notes = ["the tasks leave norms and biases without weight decay"] if options.get("weight_decay") else []
    return options, notes


def _schedule(config: Mapping[str, Any], lr: float | None) -> tuple[dict[str, Any], list[str]]:
    name, params = get(config, "scheduler.type"), get(config, "scheduler.params") or {}
    steps, given = params.get("warmup_num_steps", 1000), without_auto(params)
    warm = {} if steps == "auto" else {"warmup_steps": steps}
    notes = []
    if name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR") and given.get("warmup_type", "log") == "log":
        notes.append(f"{name} warms up along a logarithm, the tasks in a straight line")
    if name == "WarmupDecayLR":
        ends = {"warmup_lr": given["warmup_min_lr"]} if given.get("warmup_min_lr") else {}
        peak = {"lr": given["warmup_max_lr"]} if isinstance(given.get("warmup_max_lr"), int | float) else {}
        return {**peak, "schedule": "linear", **warm, **ends}, [*notes, *_end(given)]
    if name == "WarmupCosineLR":
        floor = {"min_lr": lr * given.get("cos_min_ratio", 0.0001)} if lr else {}
        ends = {"warmup_lr": lr * given["warmup_min_ratio"]} if lr and given.get("warmup_min_ratio") else {}
        return {"schedule": "cosine", **warm, **ends, **floor}, [*notes, *_end(given)]
    if name == "WarmupLR":
        return {"schedule": "constant"}, [*notes, "the tasks' constant rate has no warm-up"]
    if name == "OneCycle":
        return {"schedule": "constant"}, ["with the callback OneCycle, which decays along its own curve"]
    if name == "LRRangeTest":
        return {"schedule": "constant"}, ["`dlo lr-find` is the range test"]
    return {}, [f"{name} has no counterpart"] if name else []


def _end(given: Mapping[str, Any]) -> list[str]:
    steps = given.get("total_num_steps")
    return [f"the schedule ends with the run: trainer.max_steps: {steps}"] if isinstance(steps, int) else []
