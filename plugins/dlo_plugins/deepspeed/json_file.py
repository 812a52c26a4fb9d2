"""Reader of DeepSpeed configurations (JSON or Hjson, as in DeepSpeed), and their checks by the installed DeepSpeed.

Errors name the place in the file. A path is written as ``zero_optimization.stage``.

DeepSpeed refuses unknown keys in the sections for which it has pydantic models, and ignores them in all others and at
the top level: there ``gradient_cliping`` silently trains without clipping.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib.util
import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.errors import DloError, did_you_mean, nearest
from dlo_plugins.deepspeed.environment import check_installed, use_accelerator

#: Placeholders of templates: of shells, of Jinja, and in angle brackets.
_PLACEHOLDER = re.compile(r"\$\{?\w+\}?|\{\{.*?\}\}|^<[^<>]+>$")

#: Name in messages of a configuration that is given as a mapping.
INLINE = "strategy.config"

#: Name in messages of the strategy's typed options without a configuration.
OPTIONS_ALONE = "trainer.strategy"


class DeepSpeedJson(dict[str, Any]):
    """A DeepSpeed configuration with the name that messages use for it.

    Attributes:
        source: Path of the file it was read from, or ``strategy.config``.
    """

    def __init__(self, content: Mapping[str, Any], source: str = INLINE) -> None:
        super().__init__(content)
        self.source = source

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepSpeedJson:
        return DeepSpeedJson(copy.deepcopy(dict(self), memo), self.source)


def get_source(config: Mapping[str, Any]) -> str:
    """Returns the name that messages use for a configuration."""
    return config.source if isinstance(config, DeepSpeedJson) else INLINE


def read_json(config: str | Path | Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    """Returns a configuration and its name in messages: its file's path, :data:`INLINE`, or :data:`OPTIONS_ALONE`.

    Args:
        config: Path of a file, a mapping, or None for an empty one. Files are JSON, or Hjson (comments, trailing
            commas), as DeepSpeed reads them.

    Raises:
        DloError: If the file does not exist, does not parse (the message has line and column), repeats a key, or is not
            a mapping.
    """
    if config is None:
        return {}, OPTIONS_ALONE
    if isinstance(config, Mapping):
        try:
            inline = json.loads(json.dumps(config))
        except TypeError as error:
            raise DloError(
                f"{INLINE}: a DeepSpeed config must have only numbers, strings, booleans, lists and mappings: {error}"
            ) from error
        _check_filled(inline, INLINE)
        return inline, INLINE
    path = Path(config)
    source = str(config)
    if not path.is_file():
        raise DloError(f"DeepSpeed config {source}: the file does not exist{_suggest_file(path)}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DloError(f"{source}: a DeepSpeed config must be a text file, got binary data") from error
    if not text.strip():
        raise DloError(f'{source}: the file is empty; start from {{"zero_optimization": {{"stage": 2}}}}')
    content = parse_json(text, source)
    if not isinstance(content, dict):
        raise DloError(
            f'{source}: a DeepSpeed config must be a mapping, such as {{"zero_optimization": {{"stage": 2}}}}, got a'
            f" {type(content).__name__}"
        )
    _check_filled(content, source)
    return content, source


def _check_filled(content: Any, source: str, path: str = "") -> None:
    """Checks that no value is a template's placeholder, such as `${zero_stage},`, which Hjson reads as text.

    Raises:
        DloError: For the first placeholder, with its key.
    """
    if isinstance(content, Mapping | list):
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            _check_filled(key, source, path)
            _check_filled(value, source, f"{path}.{key}".lstrip("."))
    elif isinstance(content, str) and (_PLACEHOLDER.search(content) or content.endswith(",")):
        why = "a placeholder" if _PLACEHOLDER.search(content) else "a text without quotes, and its comma"
        raise DloError(
            f"{source}: {path or 'a key'} must be a value, got {content!r}, {why}; write the value, such as 2 or true"
        )


def _suggest_file(path: Path) -> str:
    """Returns the end of a message: the file of the same folder with the nearest name."""
    if not path.parent.is_dir():
        return f"; neither is its folder {path.parent}"
    names = [file.name for file in path.parent.iterdir() if file.suffix in (".json", ".hjson")]
    return did_you_mean(path.name, names) or f" in {path.parent.resolve()}"


def parse_json(text: str, source: str) -> Any:
    """Returns the content of a text in JSON or Hjson.

    Args:
        text: Text to parse.
        source: Name of the configuration in messages.

    Raises:
        DloError: If it is neither (the message has line and column of the JSON error), or repeats a key.
    """
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _without_repetition(pairs, source))
    except json.JSONDecodeError as error:
        content = _parse_hjson(text, source)
        if content is not None:
            return content
        line = [*text.splitlines(), ""][error.lineno - 1]
        shown = f" at {line.strip()[:60]!r}" if line.strip() else ""
        raise DloError(f"{source}: line {error.lineno}, column {error.colno}: {error.msg}{shown}") from error


def _parse_hjson(text: str, source: str) -> Any:
    """Returns the content of a text in Hjson, or None. DeepSpeed reads its files with that library."""
    if importlib.util.find_spec("hjson") is None:
        return None  # It comes with DeepSpeed; another message reports that it is missing.
    hjson: Any = importlib.import_module("hjson")
    try:
        return json.loads(
            json.dumps(hjson.loads(text, object_pairs_hook=lambda pairs: _without_repetition(pairs, source)))
        )
    except hjson.HjsonDecodeError:
        return None


def _without_repetition(pairs: list[tuple[str, Any]], source: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise DloError(f"{source}: key '{key}' must be unique, got {result[key]!r} and {value!r}; leave one out")
        result[key] = value
    return result


# --- paths -------------------------------------------------------------------------------------------------


def drop_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration, or a section of one, without the values ``"auto"`` at any level."""
    return {
        key: drop_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for key, value in config.items()
        if not (isinstance(value, str) and value == "auto")
    }


def get(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Returns the value at a path such as ``zero_optimization.stage``."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def number(config: Mapping[str, Any], path: str, default: int) -> int:
    """Returns the integer at a path; the default if there is none, or it is ``"auto"``."""
    value = get(config, path)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def get_stage(config: Mapping[str, Any]) -> int:
    """Returns the ZeRO stage; 0, DeepSpeed's default, if there is none."""
    return number(config, "zero_optimization.stage", 0)


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Sets the value at a path, and creates the sections above it."""
    *parents, last = path.split(".")
    for parent in parents:
        if config.get(parent) is None:
            config[parent] = {}
        config = config[parent]
    config[last] = value


# --- checks -----------------------------------------------------------------------------------------------

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

#: Arguments of optimizers that train differently where DeepSpeed ignores them, as it does beside `params`.
_ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "momentum", "bias_correction")

#: Optimizer types of earlier versions, in lower case.
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")

#: Replacement of each removed key, in dlo or DeepSpeed.
_INSTEAD = {
    "elasticity": "leave it out: dlo's checkpoints can be resumed on any number of ranks",
    "amp": "leave it out: --trainer.precision 16-mixed or bf16-mixed",
    "curriculum_learning": "move it to data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "leave it out",
    "nebula": "leave it out: --run.async_checkpoints true writes checkpoints in the background",
    "sparse_attention": "leave it out: torch's scaled_dot_product_attention replaces it",
}


#: Ratio of equal letters from which an unknown key is taken for a misspelt one.
_MISSPELT = 0.8


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
        put(tree, path, _fields(model))
    tree["bfloat16"] = tree["bf16"]  # its old name
    for path in _FREE:
        put(tree, path, ANY)
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


def _fields(model: Any) -> Schema:
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
    return next((model for inner in typing.get_args(annotation) if (model := _model_in(inner)) is not None), None)


def _is_mapping(annotation: Any) -> bool:
    types = [annotation, *typing.get_args(annotation)]
    return any((typing.get_origin(each) or each) is dict for each in types)


def check_keys(config: Mapping[str, Any], source: str) -> None:
    """Checks that DeepSpeed knows every key of a configuration, and warns of those that it ignores.

    A key that is close to a known one, or that is known in another section, is an error: it was meant to do something.

    Args:
        config: DeepSpeed configuration.
        source: Name of the configuration in messages: its file.

    Raises:
        DloError: For the first unknown key that DeepSpeed refuses or that has a near known one, which it names.
    """
    tree = known_keys()
    for path, known in _unknown(config, tree, ()):
        *parents, key = path
        # A comment, such as `_comment`, is not the misspelt name of another key.
        close = difflib.get_close_matches(key.lower(), known, n=1, cutoff=_MISSPELT)
        ignored = path[0] not in sections()  # DeepSpeed's pydantic models refuse unknown keys.
        hint = (did_you_mean(key, known) if close or not ignored else "") or _elsewhere(key, tree, parents)
        if not parents and not hint:
            hint = _suggest_section(key, config[key], tree)
        if parents == ["optimizer"] and key in _ARGUMENTS:
            hint = f"; it belongs at 'optimizer.params.{key}'"
        listed = "" if hint else f"; known there: {', '.join(sorted(known))}"
        if not hint and ignored:
            rank_zero_warn(f"{source}: unknown key '{'.'.join(path)}' does nothing: DeepSpeed ignores it; remove it")
            continue
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


def _suggest_section(key: str, value: Any, tree: Schema) -> str:
    """Returns the end of a message: the known path that a key at the top level abbreviates, or the section it means.

    `zero` and `zero_stage` abbreviate; a section with a similar name is meant if it has some of the value's keys.
    """
    words = key.lower().split("_")
    paths = {} if isinstance(value, str | list) else {path: re.split("[._]", path) for path in _paths(tree)}
    meant = [path for path, split in paths.items() if split[0] == words[0] and {*words} <= {*split}]
    if not meant and isinstance(value, Mapping):
        inner = {*value} - {"enabled"}
        alike = [name for name, below in tree.items() if below and inner & {*below}]
        meant = [name for name in alike if name.split("_")[0] == words[0]] or [nearest(key, alike) or ""]
    return f"; did you mean '{min(meant, key=len)}'?" if any(meant) else ""


def _paths(tree: Schema, parents: str = "") -> Iterator[str]:
    for key, below in tree.items():
        yield f"{parents}{key}"
        if below:
            yield from _paths(below, f"{parents}{key}.")


def check_removed(config: Mapping[str, Any], source: str) -> None:
    """Checks that a configuration has no key that DeepSpeed has removed.

    Raises:
        DloError: For the first one, with its replacement.
    """
    absent = object()
    for section, keys in removed_keys().items():
        for key in keys:
            path = f"{section}.{key}" if section else key
            if get(config, path, absent) is not absent:
                raise DloError(f"{source}: DeepSpeed has removed '{path}'; {_INSTEAD.get(key, 'leave it out')}")
    optimizer = config.get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if isinstance(name, str) and name.lower() in _ONE_BIT:
        raise DloError(
            f"{source}: DeepSpeed has removed the optimizer {name}; use your task's Adam (or Lamb) with the callback"
            " GradientCompression, which compresses under any data-parallel strategy"
        )


def check_whole(config: Mapping[str, Any], source: str) -> None:
    """Checks the values and the combinations of sections, as DeepSpeed's own configuration class does.

    Builds DeepSpeed 0.19.8's ``DeepSpeedConfig``, which checks in its constructor. ``"auto"`` means a default there.

    Args:
        config: DeepSpeed configuration. Its batch sizes are left out, because they are checked where the ranks are
            known, and so is ``aio``, which DeepSpeed checks against this machine, not the run's.
        source: Name of the configuration in messages.

    Raises:
        DloError: For the first invalid value, with its key and the rule, in DeepSpeed's words.
    """
    from pydantic import ValidationError

    for path, below in known_keys().items():
        value = config.get(path)
        if below is not None and value is not None and not isinstance(value, Mapping) and value is not False:
            example = f'"{path}": {{"{next(iter(below), "key")}": ...}}'
            raise DloError(f"{source}: {path} must be a section, such as {example}, got {value!r}")
    module = import_config_module()
    left_out = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "aio")
    content = {key: value for key, value in drop_auto(config).items() if key not in left_out}
    try:
        module.DeepSpeedConfig({**content, "train_micro_batch_size_per_gpu": 1})
    except ValidationError as error:
        first = error.errors()[0]
        # The model of the monitors has one section each in its fields.
        section = [path for path, model in sections().items() if model.__name__ == error.title]
        path = ".".join([*section, *(str(key) for key in first["loc"])])
        message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        message = re.sub(r", (\w+) or \1$", r" or \1", message)  # DeepSpeed lists stage 3 twice.
        given = f", got {first['input']!r}" if first["loc"] else ""
        raise DloError(f"{source}: {path}: {message}{given}") from error
    except (AssertionError, TypeError, ValueError, module.DeepSpeedConfigError) as error:
        raise DloError(f"{source}: DeepSpeed refuses the config: {error}") from error
