"""Translation between DeepSpeed's JSON and dlo's YAML, in both directions."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed import json_file
from dlo_plugins.deepspeed.batch_settings import MICRO, STEPS, TRAIN
from dlo_plugins.deepspeed.config import DeepSpeedJson, fill_from_trainer, merge_options
from dlo_plugins.deepspeed.json_precision import CLIPPING
from dlo_plugins.deepspeed.json_trainer_options import (
    get_open_settings,
    get_trainer_options,
    infer_json_ranks,
    read_settings,
)
from dlo_plugins.deepspeed.nested_paths import get, put
from dlo_plugins.deepspeed.options import OPTIONS
from dlo_plugins.deepspeed.task_options import task_options

#: Keys of a JSON that have no effect under dlo, with the reason.
_NO_EFFECT = {
    "checkpoint": "dlo writes its own checkpoints, which every strategy reads",
    "datastates_ckpt": "dlo writes its own checkpoints; run.async_checkpoints: true writes them in the background",
    "dataloader_drop_last": "dlo's loaders drop the last incomplete training batch",
}

_OFFLOAD, _NVME = "zero_optimization.offload_{}", "nvme_path"


class DeepSpeedTranslation:
    """Mixin of DeepSpeedBridge with its answers to `dlo deepspeed-config` and to a Trainer about to be built."""

    #: Configuration from options and JSON, before the Trainer is known.
    asked: DeepSpeedJson

    def trainer_arguments(self, given: Mapping[str, Any], datamodule: Any = None) -> dict[str, Any]:
        """Returns the Trainer's arguments that the JSON sets and the config leaves at the default; called by `dlo fit`.

        Args:
            given: Arguments of the Trainer by name.
            datamodule: Datamodule of the run.

        Raises:
            DloError: If both set different values.
        """
        return get_open_settings(self.asked, given, datamodule)

    @staticmethod
    def to_yaml(path: str | Path, ranks: int | None = None) -> str:
        """Returns the config of a run that a DeepSpeed JSON describes; see :func:`to_yaml`."""
        return to_yaml(path, ranks)

    @staticmethod
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
        ranks = strategy.num_nodes * strategy.num_processes if isinstance(strategy, DDPStrategy) else 1
        if isinstance(strategy, DeepSpeedTranslation):
            config, given = strategy.asked, {**given, **get_open_settings(strategy.asked, given, datamodule)}
        else:
            config = make_nearest_config(strategy)
        facts = read_settings(given, ranks, datamodule)
        result: dict[str, Any] = fill_from_trainer(config, facts)
        if facts.micro_batch_size is None and all(config.get(key, "auto") == "auto" for key in (TRAIN, MICRO)):
            result = {**result, TRAIN: "auto", MICRO: "auto"}
        return json.dumps(result, indent=2)


# --- a JSON as YAML ----------------------------------------------------------------------------------------


def to_options(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the bridge's typed options that a configuration has, and its remaining content.

    ``merge_options(*to_options(config))`` returns the same configuration.

    Args:
        config: Configuration that ``merge_options`` returned.
    """
    rest: dict[str, Any] = copy.deepcopy(dict(config))
    options: dict[str, Any] = {}
    _take_switches(rest, options)
    for name, option in OPTIONS.items():
        value = get(rest, option.path)
        if name in ("activation_checkpointing", "flops_profiler", "comms_logger"):
            continue  # whole sections
        if value is None or value in ("auto", "none") or isinstance(value, Mapping | list):
            continue
        options[name] = int(value) if isinstance(value, float) and value.is_integer() else value
        _drop(rest, option.path)
    _take_nvme_path(rest, options)
    return options, rest


def _take_switches(rest: dict[str, Any], options: dict[str, Any]) -> None:
    """Moves the sections that one option replaces from ``rest`` to ``options``."""
    if rest.get("comms_logger") in ({"enabled": True}, {"enabled": False}):
        options["comms_logger"] = rest.pop("comms_logger")["enabled"]
    profiler = rest.get("flops_profiler")
    if profiler in ({"enabled": True}, {"enabled": False}):
        options["flops_profiler"] = rest.pop("flops_profiler")["enabled"]
    elif isinstance(profiler, dict) and set(profiler) == {"enabled", "profile_step"} and profiler["enabled"] is True:
        options["flops_profiler"] = rest.pop("flops_profiler")["profile_step"]


def _take_nvme_path(rest: dict[str, Any], options: dict[str, Any]) -> None:
    """Moves the common folder of all NVMe offloads from ``rest`` to ``options``."""
    on_nvme = [
        _OFFLOAD.format(section)
        for section, name in (("optimizer", "offload_optimizer"), ("param", "offload_parameters"))
        if options.get(name) == "nvme"
    ]
    paths = {get(rest, f"{section}.{_NVME}") for section in on_nvme}
    if len(paths) == 1 and None not in paths:
        options[_NVME] = paths.pop()
        for section in on_nvme:
            _drop(rest, f"{section}.{_NVME}")


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
    settings = get_trainer_options(config, ranks or infer_json_ranks(config))
    options, rest = to_options(config)
    for path in (STEPS, CLIPPING, "fp16.enabled", "bf16.enabled"):
        # Each is the Trainer's now; a disabled section stays, and contradicts a Trainer that enables it.
        if get(rest, path) not in (None, False):
            _drop(rest, path)
    for key in [key for key, value in rest.items() if value == "auto"]:
        del rest[key]
    trainer: dict[str, Any] = {"devices": devices} if (devices := ranks or infer_json_ranks(config)) else {}
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
    content, source = json_file.read_json(path)
    config = merge_options({}, path)
    text = yaml.safe_dump({"trainer": to_config(config, ranks)}, sort_keys=False, default_flow_style=None, width=100)
    lines = [f"# {source}, for dlo fit: pass it after your task's config: --config task.yaml --config this.yaml.", text]
    lines += [f"# {comment}" for comment in _comments(config, content, ranks)]
    return "\n".join(line.rstrip("\n") for line in lines) + "\n"


def _comments(config: Mapping[str, Any], content: Mapping[str, Any], ranks: int | None) -> list[str]:
    comments = []
    world, micro = ranks or infer_json_ranks(config), config.get(MICRO)
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
    return comments + [f"{key} has no effect here: {why}." for key, why in _NO_EFFECT.items() if key in config]


# --- YAML as a JSON ----------------------------------------------------------------------------------------


def make_nearest_config(strategy: Strategy) -> DeepSpeedJson:
    """Returns the DeepSpeed configuration nearest to another strategy.

    Raises:
        DloError: If DeepSpeed has no equivalent.
    """
    from dlo_plugins.strategies.mesh import MeshStrategy
    from dlo_plugins.strategies.zero import MIB, ZeroStrategy

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
        offloaded = "both" if strategy.fully_shard.offload else None
    else:
        put(config, "zero_optimization.stage", 0)
        offloaded = None
    for section, names in (("optimizer", ("optimizer", "both")), ("param", ("parameters", "both"))):
        if offloaded in names:
            put(config, f"{_OFFLOAD.format(section)}.device", "cpu")
    return merge_options({}, config)
