"""Translation between DeepSpeed's JSON and dlo's YAML, in both directions."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.config import OFFLOADED, OPTIONS, merge_options, unused_checkpointing
from dlo_plugins.deepspeed.json_file import DeepSpeedJson, drop_auto, get, put, read_json
from dlo_plugins.deepspeed.optimizer_and_schedule import make_optimizer_args
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.deepspeed.trainer_settings import (
    CLIPPING,
    MICRO,
    STEPS,
    TRAIN,
    fill_from_trainer,
    get_trainer_options,
    infer_ranks,
    read_settings,
)
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import MIB, ZeroStrategy

#: Keys of a JSON that have no effect under dlo, with the reason.
_NO_EFFECT = {
    "checkpoint": "dlo writes its own checkpoints, which every strategy reads",
    "datastates_ckpt": "dlo writes its own checkpoints; run.async_checkpoints: true writes them in the background",
    "dataloader_drop_last": "dlo's loaders drop the last incomplete training batch",
}


# --- a JSON as YAML ----------------------------------------------------------------------------------------


def to_options(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the bridge's typed options that a configuration has, and its remaining content.

    ``merge_options(*to_options(config))`` returns the same configuration.

    Args:
        config: Configuration that ``merge_options`` returned.
    """
    rest: dict[str, Any] = copy.deepcopy(dict(config))
    options: dict[str, Any] = {}
    for name in ("comms_logger", "flops_profiler"):
        if rest.get(name) in ({"enabled": True}, {"enabled": False}):
            options[name] = rest.pop(name)["enabled"]
    profiler = rest.get("flops_profiler", {})
    if profiler.keys() == {"enabled", "profile_step"} and profiler["enabled"] is True:
        options["flops_profiler"] = rest.pop("flops_profiler")["profile_step"]
    for name, path in OPTIONS.items():
        value = get(rest, path)
        if name in ("activation_checkpointing", "flops_profiler", "comms_logger"):
            continue  # whole sections
        if value is None or value in ("auto", "none") or isinstance(value, Mapping | list):
            continue
        options[name] = int(value) if isinstance(value, float) and value.is_integer() else value
        _drop(rest, path)
    on_nvme = [f"{section}.nvme_path" for name, section in OFFLOADED.items() if options.get(name) == "nvme"]
    folders = {get(rest, path) for path in on_nvme}
    if len(folders) == 1 and None not in folders:
        options["nvme_path"] = folders.pop()
        for path in on_nvme:
            _drop(rest, path)
    return options, rest


def _drop(config: dict[str, Any], path: str) -> None:
    """Removes a key, and the sections that become empty."""
    parent, _, key = path.rpartition(".")
    section = get(config, parent) if parent else config
    del section[key]
    if parent and not section:
        _drop(config, parent)


def to_config(config: Mapping[str, Any], ranks: int | None = None) -> dict[str, Any]:
    """Returns the `trainer` section of the run that a configuration describes.

    Args:
        config: Configuration that ``merge_options`` returned.
        ranks: Number of ranks, if the configuration's batch sizes do not imply it.
    """
    settings = get_trainer_options(config, ranks or infer_ranks(config))
    options, rest = to_options(config)
    for path in (STEPS, CLIPPING, "fp16.enabled", "bf16.enabled"):
        # Each is the Trainer's now; a disabled section stays, and contradicts a Trainer that enables it.
        if get(rest, path) not in (None, False):
            _drop(rest, path)
    for key in [key for key, value in rest.items() if value == "auto"]:
        del rest[key]
    trainer: dict[str, Any] = {"devices": devices} if (devices := ranks or infer_ranks(config)) else {}
    arguments = {**options, **({"config": rest} if rest else {})}
    if "stage" not in options and not rest:
        arguments["stage"] = 0  # An empty JSON means stage 0; no JSON means stage 2.
    return {**trainer, **settings, "strategy": {"class_path": "DeepSpeedBridge", "init_args": arguments}}


def to_yaml(path: str | Path, ranks: int | None = None) -> str:
    """Returns a DeepSpeed JSON as the `trainer` section of a config, with comments for what does not fit there.

    The optimizer and scheduler stay DeepSpeed's, under ``config``, because their curves and defaults differ from those
    of dlo's tasks. A comment has the nearest options of a task.

    Args:
        path: Path of the JSON file.
        ranks: Number of ranks; None derives it from the JSON's batch sizes.

    Raises:
        DloError: If ``merge_options`` refuses the JSON.
    """
    content, source = read_json(path)
    config = merge_options({}, path)
    text = yaml.safe_dump({"trainer": to_config(config, ranks)}, sort_keys=False, default_flow_style=None, width=100)
    lines = [f"# {source}, for dlo fit: pass it after your task's config: --config task.yaml --config this.yaml.", text]
    lines += [f"# {comment}" for comment in _comments(config, content, ranks)]
    return "\n".join(line.rstrip("\n") for line in lines) + "\n"


def _comments(config: Mapping[str, Any], content: Mapping[str, Any], ranks: int | None) -> list[str]:
    comments = []
    world, micro = ranks or infer_ranks(config), config.get(MICRO)
    if isinstance(micro, int):
        batch = f"data.init_args.batch_size: {micro * world}" if world else f"{micro} x the ranks"
        comments.append(f"A rank's micro-batch is {micro}; dlo's batch_size counts all ranks: {batch}.")
    if CLIPPING not in content:
        comments.append("The JSON does not set gradient_clipping: dlo does not clip, DeepSpeed 0.19 clips to 1.0.")
    if world is None:
        comments.append("The JSON does not set the number of ranks: set trainer.devices.")
    options, notes = task_options(config)
    if options:
        shown = yaml.safe_dump(options, default_flow_style=True, sort_keys=False, width=10**6).strip()
        comments.append(f"Nearest options of a task, in place of optimizer and scheduler: model.init_args: {shown}")
        comments += [f"  but {note}" for note in notes]
    comments += [
        f"activation_checkpointing.{name} has no effect here: it divides activations among model-parallel ranks, and"
        " DeepSpeedBridge has one."
        for name in unused_checkpointing(config)
    ]
    return comments + [f"{key} has no effect here: {why}." for key, why in _NO_EFFECT.items() if key in config]


# --- YAML as a JSON ----------------------------------------------------------------------------------------


def to_json(trainer: Trainer, given: Mapping[str, Any], datamodule: Any = None) -> str:
    """Returns the DeepSpeed JSON of a config, as text; unknown batch sizes are ``"auto"``.

    Args:
        trainer: Trainer built from the config.
        given: Arguments of the Trainer in the config.
        datamodule: Datamodule of the config; None without one.

    Raises:
        DloError: If the strategy has no DeepSpeed equivalent.
    """
    strategy = trainer.strategy
    ranks = trainer.num_nodes * trainer.num_devices
    if isinstance(strategy, DeepSpeedBridge):
        config, given = strategy.asked, {**given, **strategy.trainer_arguments(given, datamodule)}
    else:
        config = make_nearest_config(strategy)
    settings = read_settings(given, ranks, datamodule)
    result: dict[str, Any] = fill_from_trainer(config, settings)
    if settings.micro_batch_size is None and all(config.get(key, "auto") == "auto" for key in (TRAIN, MICRO)):
        result = {**result, TRAIN: "auto", MICRO: "auto"}
    return json.dumps(result, indent=2)


def make_nearest_config(strategy: Strategy) -> DeepSpeedJson:
    """Returns the DeepSpeed configuration nearest to another strategy.

    Raises:
        DloError: If DeepSpeed has no equivalent.
    """
    config: dict[str, Any] = {}
    if isinstance(strategy, ZeroStrategy):
        put(config, "zero_optimization.stage", strategy.stage)
        if strategy.stage < 3:
            put(config, "zero_optimization.reduce_bucket_size", int(strategy.bucket_mb * MIB / 4))
        offloaded = strategy.offload
    elif isinstance(strategy, MeshStrategy):
        spec = strategy.mesh_spec()
        cut = [axis for axis in ("pp", "cp", "tp") if getattr(spec, axis) > 1]
        if cut or (spec.dp_replicate > 1 and spec.dp_shard > 1):
            what = cut[0] if cut else "dp_replicate"
            raise DloError(
                f"deepspeed-config: {what} must be 1 to translate a mesh to DeepSpeed's ZeRO stage 3, got"
                f" {getattr(spec, what)}; set {what} 1"
            )
        put(config, "zero_optimization.stage", 3 if spec.dp_shard > 1 else 0)
        offloaded = "both" if strategy.appliers.shard.offload else None
    else:
        put(config, "zero_optimization.stage", 0)
        offloaded = None
    for option, section in OFFLOADED.items():
        if offloaded in (option.removeprefix("offload_"), "both"):
            put(config, f"{section}.device", "cpu")
    return merge_options({}, config)


# --- nearest options of a task -----------------------------------------------------------------------------

#: timm's names of torch's classes where they differ; the tasks use timm's names.
_NAMES = {"NAdam": "nadam", "RAdam": "radam", "RMSprop": "rmsprop"}


def task_options(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the nearest `init_args` of CausalLM or ImageClassifier, and notes on how they differ.

    Args:
        config: Configuration that ``merge_options`` returned.
    """
    options, notes = _optimizer(config)
    schedule, more = _schedule(config, options.get("lr"))
    return {**options, **schedule}, notes + more


def _optimizer(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    class_and_args = make_optimizer_args(drop_auto(config))
    if class_and_args is None:
        return {}, []
    cls, arguments = class_and_args
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
