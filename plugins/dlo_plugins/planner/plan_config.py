"""Writes a candidate as a config: the user's configs and overrides, with the plan's strategy, batch and ranks."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.errors import DloError
from dlo_plugins.planner.candidate import Candidate

#: Appliers of a config that the plan replaces; others, such as CompileBlocks, stay.
_REPLACED = ("ActivationCheckpoint", "FullyShard", "TensorParallel", "ContextParallel")


def merge_configs(found: ConfigScan) -> dict[str, Any]:
    """Returns the content of all configs of a command line, with its overrides of single keys."""
    merged: dict[str, Any] = {}
    for content in found.configs.values():
        _merge(merged, copy.deepcopy(content))
    for part in ("model", "data"):
        if isinstance(merged.get(part), str):
            merged[part] = {"class_path": merged[part]}
    words = iter(found.argv[1:])
    for word in words:
        if not word.startswith("--"):
            continue
        key, has_value, value = word[2:].partition("=")
        value = value if has_value else next(words, "")
        if key not in ("config", "c", "plugins", "plugins+"):
            _set(merged, key.split("."), yaml.safe_load(value))
    return merged


def _merge(into: dict[str, Any], content: dict[str, Any]) -> None:
    for key, value in content.items():
        own = into.get(key)
        same_class = not isinstance(value, dict) or value.get("class_path") in (None, (own or {}).get("class_path"))
        if isinstance(value, dict) and isinstance(own, dict) and same_class:
            _merge(own, value)
        else:
            into[key] = value


def _set(content: dict[str, Any], words: list[str], value: Any) -> None:
    for word in words[:-1]:
        inner = content.get(word)
        if not isinstance(inner, dict):
            inner = content[word] = {} if inner is None else {"class_path": inner}
        content = inner
    content[words[-1]] = value


def without_recomputation(config: dict[str, Any]) -> list[str]:
    """Returns the options of a command line that switch off the task's own recomputation, which a plan chooses."""
    options = _init_args(config, "model")
    return ["--model.init_args.recompute", "false"] if options.get("recompute") else []


def read_batch(config: dict[str, Any]) -> int | None:
    """Returns the rows of a step on all ranks that a config asks for; None if it does not say."""
    size = _init_args(config, "data").get("batch_size")
    accumulate = (config.get("trainer") or {}).get("accumulate_grad_batches") or 1
    return size * accumulate if isinstance(size, int) and isinstance(accumulate, int) else None


def _init_args(config: dict[str, Any], part: str) -> dict[str, Any]:
    entry = config.get(part)
    if not isinstance(entry, dict):
        return {}
    options = entry.get("init_args") if "class_path" in entry else entry
    return options if isinstance(options, dict) else {}


def candidate_config(candidate: Candidate, config: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Returns a config that runs a candidate.

    Args:
        candidate: Candidate.
        config: Merged config of the user; it is not changed.
        nodes: Number of nodes.

    Raises:
        DloError: The config's datamodule has no `batch_size` to set.
    """
    found, layout = copy.deepcopy(config), candidate.layout
    mesh = layout.mesh
    trainer = found.setdefault("trainer", {})
    before = trainer.get("strategy")
    trainer |= {"devices": mesh.world_size // nodes, "num_nodes": nodes, "strategy": _strategy(candidate, before)}
    rows = layout.micro_batch * mesh.data_size
    if mesh.pp > 1:
        rows *= layout.micro_batches
    trainer["accumulate_grad_batches"] = layout.global_batch // rows
    data = found.get("data")
    if not isinstance(data, dict) or "class_path" not in data:
        raise DloError(
            "data must be a datamodule with batch_size for a plan to be written, got none; add data: {class_path: ...,"
            " init_args: {batch_size: ...}}, or leave out --out"
        )
    data.setdefault("init_args", {})["batch_size"] = rows
    if _init_args(found, "model").get("recompute"):
        found["model"]["init_args"]["recompute"] = False
    return found


def _strategy(candidate: Candidate, before: Any) -> dict[str, Any]:
    """Returns the strategy of a candidate; appliers of the config's own strategy that the plan does not choose stay."""
    layout = candidate.layout
    options: dict[str, Any] = {axis: size for axis, size in layout.mesh.sizes.items() if size > 1}
    options["dp_shard"] = layout.mesh.dp_shard
    appliers: list[Any] = []
    if isinstance(before, dict):
        given = (before.get("init_args") or {}).get("appliers") or []
        appliers = [entry for entry in given if _class_name(entry) not in _REPLACED]
    if layout.mesh.pp > 1:
        options |= {
            "schedule": layout.schedule,
            "micro_batches": layout.micro_batches,
            "split": list(candidate.split),
        }
        if layout.stages_option is not None and layout.schedule == "Interleaved1F1B":
            options["stages_per_rank"] = layout.stages_option
    if layout.mesh.tp > 1:
        options["sequence_parallel"] = layout.sequence_parallel
    if layout.recompute != "none":
        chosen = {"mode": layout.recompute} | ({"every": layout.every} if layout.every > 1 else {})
        appliers.append({"class_path": "ActivationCheckpoint", "init_args": chosen})
    if layout.zero:
        sharding: dict[str, Any] = {"reshard_after_forward": layout.zero == 3}
        if layout.reduce_each:
            sharding["sync_every_micro_batch"] = True
        appliers.append({"class_path": "FullyShard", "init_args": sharding})
    if appliers:
        options["appliers"] = appliers
    return {"class_path": "MeshStrategy", "init_args": options}


def _class_name(entry: Any) -> str:
    path = entry.get("class_path", "") if isinstance(entry, dict) else str(entry)
    return str(path).rpartition(".")[2]


def uses_applier(config: dict[str, Any], name: str) -> bool:
    """Returns whether a config's strategy has an applier, or a callback, of a class."""
    trainer = config.get("trainer") or {}
    strategy = trainer.get("strategy")
    given = (strategy.get("init_args") or {}).get("appliers") or [] if isinstance(strategy, dict) else []
    callbacks = trainer.get("callbacks") or []
    return any(_class_name(entry) == name for entry in [*given, *(callbacks if isinstance(callbacks, list) else [])])


def write_yaml(candidate: Candidate, config: dict[str, Any], nodes: int, number: int) -> str:
    """Returns a candidate's config as text, with its prediction as a comment."""
    low, high = candidate.interval
    head = [
        f"# Plan {number}: {candidate.layout}",
        f"# predicted {candidate.time.total:.3g} s a step ({low:.3g} to {high:.3g}), {candidate.throughput:,.0f} a"
        f" second, MFU {candidate.mfu:.1%}, {candidate.memory.total / 1e9:.1f} GB a rank",
        f"# why       {candidate.reason}",
    ]
    return "\n".join([*head, yaml.safe_dump(candidate_config(candidate, config, nodes), sort_keys=False)])
