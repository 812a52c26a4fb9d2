"""Known keys of a DeepSpeed configuration, read from the installed DeepSpeed.

DeepSpeed refuses unknown keys in the sections for which it has pydantic models, and ignores them in all others and at
the top level: there ``gradient_cliping`` silently trains without clipping.
"""

from __future__ import annotations

import functools
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from dlo_framework.errors import DloError, did_you_mean
from dlo_plugins.deepspeed.environment import check_installed, use_accelerator

#: Tree of known keys; None is a plain value, ANY a section with arbitrary content.
Schema = dict[str, Any]
ANY: Schema = {}

#: Keys that DeepSpeed's configuration class does not read, but ``deepspeed.initialize`` or its launchers do.
_READ_ELSEWHERE = ("data_parallel_size", "sequence_parallel_size", "allgather_size")

#: Sections that DeepSpeed reads key by key, and their subsections.
_PLAIN: Schema = {
    "activation_checkpointing": {},
    "aio": {},
    "autotuning": {"model_info": {}},
    "checkpoint": {"parallel_write": {}, "writer": {}},
    "data_efficiency": {"data_sampling": {"curriculum_learning": {}, "dynamic_batching": {}}, "data_routing": {}},
    "data_types": {},
    "flops_profiler": {},
    "timers": {},
    "torch_autocast": {},
}

#: Free-form sections: names that the user chooses, or arguments of a class that another key names.
_FREE = ("optimizer.params", "scheduler.params", "datastates_ckpt", "expert_parallel", "autotuning.arg_mappings")


class Section(Protocol):
    """Interface of DeepSpeed's pydantic models that this module needs."""

    model_fields: dict[str, Any]


class _Asked(dict[str, Any]):
    """Mapping that records the keys it is asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: dict[str, None] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.asked[key] = None
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked[key] = None
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked[str(key)] = None
        return super().__contains__(key)

    def keys(self) -> Any:
        """Returns itself: DeepSpeed tests ``key in config.keys()``."""
        return self

    def __copy__(self) -> _Asked:
        """Returns itself: DeepSpeed reads a shallow copy."""
        return self


@functools.cache
def known_keys() -> Schema:
    """Returns the tree of the keys that the installed DeepSpeed knows.

    Reads DeepSpeed 0.19.8, which publishes no such list: a mapping that records the keys it is asked for is passed to
    ``deepspeed.runtime.config.DeepSpeedConfig``, which gives the keys of the top level and of the sections that are
    read key by key; the other sections are pydantic models with named fields.

    Raises:
        DloError: If DeepSpeed is not installed.
    """
    tree = _asked_tree()
    for path, model in sections().items():
        _put(tree, path, _fields(model))
    tree["bfloat16"] = tree["bf16"]  # its old name
    for path in _FREE:
        _put(tree, path, ANY)
    for section, keys in removed_keys().items():
        for key in keys:
            (tree[section] if section else tree).pop(key, None)
    for section in ("optimizer", "scheduler"):
        tree[section] = {"type": None, "params": ANY, **({"legacy_fusion": None} if section == "optimizer" else {})}
    routing = tree["data_efficiency"]["data_routing"]
    routing["random_ltd"] = ANY
    tree["data_efficiency"]["data_sampling"]["curriculum_learning"] = ANY
    for name in ("metrics_path", "max_tokens"):  # asked for only where dynamic batching is on
        tree["data_efficiency"]["data_sampling"]["dynamic_batching"][name] = None
    return tree


def _asked_tree() -> Schema:
    """Returns the keys that DeepSpeed's configuration class reads, section by section."""
    config_module = import_config_module()
    recorder = _recorders(_PLAIN)
    recorder["train_micro_batch_size_per_gpu"] = 1
    config = config_module.DeepSpeedConfig(recorder)
    tree = _asked_keys(recorder)
    tree["pipeline"] = dict.fromkeys(config.pipeline)
    tree["aio"] = dict.fromkeys(config.aio_config)
    tree |= dict.fromkeys(name for name in _READ_ELSEWHERE if name not in tree)
    return tree


def _recorders(plain: Schema) -> _Asked:
    return _Asked({name: _recorders(inner) for name, inner in plain.items()})


def _asked_keys(recorder: _Asked) -> Schema:
    held = dict(recorder.items())
    return {key: _asked_keys(held[key]) if isinstance(held.get(key), _Asked) else None for key in recorder.asked}


def import_config_module() -> Any:
    """Returns ``deepspeed.runtime.config``.

    Raises:
        DloError: If DeepSpeed is not installed.
    """
    check_installed()
    if "deepspeed" not in sys.modules and not torch.cuda.is_available():
        use_accelerator("cpu")  # Otherwise DeepSpeed searches for devices, and warns that it finds none.
    from deepspeed.runtime import config

    return config


def removed_keys() -> dict[str, list[str]]:
    """Returns the keys that the installed DeepSpeed refuses as removed, by section; the top level is ``""``.

    Reads private tables of ``deepspeed.runtime.config`` in DeepSpeed 0.19.8; versions without the tables have removed
    nothing.
    """
    module = import_config_module()
    tables = {"": "_REMOVED_TOP_LEVEL_CONFIG_KEYS", "zero_optimization": "_REMOVED_ZERO_CONFIG_KEYS"}
    return {section: list(getattr(module, table, {})) for section, table in tables.items()}


@functools.cache
def sections() -> dict[str, Any]:
    """Returns DeepSpeed's pydantic models by the path of their section (private modules of DeepSpeed 0.19.8)."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "hybrid_engine": HybridEngineConfig,
        "compile": CompileConfig,
        "weight_quantization": WeightQuantConfig,
        "tensor_parallel": TPTrainingConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def _fields(model: Section) -> Schema:
    tree: Schema = {}
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        below = _fields(inner) if inner is not None else ANY if _is_mapping(field.annotation) else None
        tree |= dict.fromkeys([name, *([field.alias] if field.alias else [])], below)
    return tree


def _model_in(annotation: Any) -> Any:
    """Returns the pydantic model in a field's type, such as ``Optional[X]``; None if there is none."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return annotation
    return next((found for inner in typing.get_args(annotation) if (found := _model_in(inner)) is not None), None)


def _is_mapping(annotation: Any) -> bool:
    types = [annotation, *typing.get_args(annotation)]
    return any((typing.get_origin(each) or each) is dict for each in types)


def _put(tree: Schema, path: str, below: Schema) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        tree = tree[parent]
    tree[last] = below


def check_keys(config: Mapping[str, Any], source: str) -> None:
    """Checks that DeepSpeed knows every key of a configuration.

    Args:
        config: DeepSpeed configuration.
        source: Name of the configuration in messages: its file.

    Raises:
        DloError: For the first unknown key, with the nearest known one, or the section where it belongs.
    """
    tree = known_keys()
    for path, known in _unknown(config, tree, ()):
        *parents, key = path
        hint = did_you_mean(key, known) or _elsewhere(key, tree, parents)
        listed = "" if hint else f"; known there: {', '.join(sorted(known))}"
        raise DloError(f"{source}: unknown key '{'.'.join(path)}'{hint}{listed}")


def _unknown(
    config: Mapping[str, Any], tree: Schema, parents: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    for key, value in config.items():
        path = (*parents, str(key))
        if str(key) not in tree:
            yield path, list(tree)
        elif tree[key] and isinstance(value, Mapping):
            yield from _unknown(value, tree[key], path)


def _elsewhere(key: str, tree: Schema, parents: list[str]) -> str:
    """Returns the end of a message: the section in which a key that is unknown here is known."""
    places = [path for path in _paths(tree) if path.split(".")[-1] == key and path != ".".join([*parents, key])]
    return f"; it belongs at '{places[0]}'" if places else ""


def _paths(tree: Schema, parents: str = "") -> Iterator[str]:
    for key, below in tree.items():
        yield f"{parents}{key}"
        if below:
            yield from _paths(below, f"{parents}{key}.")
