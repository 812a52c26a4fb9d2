"""Layouts and configs: reads the layout of a run from its config, and writes a candidate as one."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import yaml

from dlo_framework.errors import DloError
from dlo_framework.mesh import AXES, MeshSpec
from dlo_plugins.parallel.gathered_dtype import default_param_dtype
from dlo_plugins.parallel.pipeline.pipeline_schedules import make_placement
from dlo_plugins.plan.layout import Layout, StateFormat
from dlo_plugins.plan.plan_search import Candidate

#: Appliers of a config that the plan replaces; others, such as CompileBlocks, stay.
_REPLACED = ("ActivationCheckpoint", "FullyShard", "TensorParallel", "ContextParallel", "ExpertParallel")
#: Options of a config's strategy that stay, and the axis of more than one rank that each needs.
_KEPT_OPTIONS = {
    **{"meta_init": None, "timeout_minutes": None, "bf16_weights": None},
    **{"async_tp": "tp", "cp_method": "cp"},
}
#: Options of a config's FullyShard that stay.
_KEPT = ("units", "find_unused")


def read_batch(config: dict[str, Any]) -> int | None:
    """Returns the rows of a step on all ranks that a config asks for; None if it does not say."""
    size = _init_args(config, "data").get("batch_size")
    accumulate = (config.get("trainer") or {}).get("accumulate_grad_batches") or 1
    return size * accumulate if isinstance(size, int) and isinstance(accumulate, int) else None


def read_device(config: dict[str, Any]) -> str:
    """Returns the type of the device that a config's run has on this machine, `cuda` or `cpu`."""
    on_cpu = (config.get("trainer") or {}).get("accelerator") == "cpu"
    return "cuda" if torch.cuda.is_available() and not on_cpu else "cpu"


def _init_args(config: dict[str, Any], part: str) -> dict[str, Any]:
    entry = config.get(part)
    if not isinstance(entry, dict):
        return {}
    options = entry.get("init_args") if "class_path" in entry else entry
    return options if isinstance(options, dict) else {}


def candidate_config(candidate: Candidate, config: dict[str, Any], nodes: int, state: StateFormat) -> dict[str, Any]:
    """Returns a config that runs a candidate.

    Args:
        candidate: Candidate.
        config: Config of the user; it is not changed.
        nodes: Number of nodes.
        state: Bytes of the run's tensors.

    Raises:
        DloError: The config's datamodule has no `batch_size` to set.
    """
    new_config, layout = copy.deepcopy(config), candidate.layout
    mesh = layout.mesh
    trainer = new_config.setdefault("trainer", {})
    before = trainer.get("strategy")
    strategy = _zero_strategy(before, state) if layout.uses_zero_strategy else mesh_strategy(candidate, before, state)
    trainer |= {"devices": mesh.world_size // nodes, "num_nodes": nodes, "strategy": strategy}
    callbacks = [entry for entry in _callbacks(new_config) if _class_name(entry) != "Rotor"]
    if layout.recompute == "rotor":
        # On an accelerator a run measures its link.
        offload = {"offload": True} if layout.offload else {}
        callbacks.append({"class_path": "Rotor", "init_args": {"budget": f"{layout.budget // 1000}kB", **offload}})
    if callbacks or trainer.get("callbacks"):
        trainer["callbacks"] = callbacks
    rows = layout.micro_batch * mesh.data_size
    if mesh.pp > 1:
        rows *= layout.micro_batches
    trainer["accumulate_grad_batches"] = layout.global_batch // rows
    data = new_config.get("data")
    if not isinstance(data, dict) or "class_path" not in data:
        raise DloError(
            "data must be a datamodule with batch_size for a plan to be written, got none; add data: {class_path: ...,"
            " init_args: {batch_size: ...}}, or leave out --out"
        )
    data.setdefault("init_args", {})["batch_size"] = rows
    if _init_args(new_config, "model").get("recompute"):
        new_config["model"]["init_args"]["recompute"] = False
    return new_config


def _zero_strategy(before: Any, state: StateFormat) -> dict[str, Any]:
    kept = _kept_options(before, MeshSpec())
    dtypes = state.dtypes if state.has_masters else {}
    return {"class_path": "ZeroStrategy", "init_args": {"stage": 1, **kept, **dtypes}}


def _kept_options(before: Any, mesh: MeshSpec) -> dict[str, Any]:
    """Returns the options of a config's strategy that stay under a plan's."""
    options, sizes = strategy_options(before), mesh.sizes
    return {
        key: options[key]
        for key, axis in _KEPT_OPTIONS.items()
        if options.get(key) and (axis is None or sizes[axis] > 1)
    }


def strategy_options(entry: Any) -> dict[str, Any]:
    """Returns the options of a config's strategy, applier or callback; none of one that is a name."""
    return (entry.get("init_args") or {}) if isinstance(entry, dict) else {}


def mesh_strategy(candidate: Candidate, before: Any, state: StateFormat) -> dict[str, Any]:
    """Returns the strategy of a candidate; appliers of the config's own strategy that the plan does not choose stay.

    Args:
        candidate: Candidate.
        before: Strategy of the user's config.
        state: Bytes of the run's tensors.
    """
    layout = candidate.layout
    options: dict[str, Any] = {axis: size for axis, size in layout.mesh.sizes.items() if size > 1}
    options |= {"ep": layout.mesh.ep} if layout.mesh.ep > 1 else {}
    options |= {"dp_shard": layout.mesh.dp_shard, **_kept_options(before, layout.mesh)}
    given = _appliers(before)
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
    if layout.recompute not in ("none", "rotor"):
        chosen = {"mode": layout.recompute} | ({"every": layout.every} if layout.every > 1 else {})
        appliers.append({"class_path": "ActivationCheckpoint", "init_args": chosen})
    # FSDP2 gathers the copies of a model in a dtype, too.
    has_dtypes = bool(state.dtypes) and layout.mesh.dp_replicate > 1
    if layout.delays and layout.zero and state.dtypes:
        appliers.append({"class_path": "FullyShard", "init_args": state.dtypes})
    elif (layout.zero or has_dtypes) and not layout.delays:
        own = next((strategy_options(entry) for entry in given if _class_name(entry) == "FullyShard"), {})
        kept = {key: value for key, value in own.items() if key in _KEPT and value}
        sharding: dict[str, Any] = {**kept, "reshard_after_forward": layout.zero == 3, **state.dtypes}
        if layout.reduce_each:
            sharding["sync_every_micro_batch"] = True
        appliers.append({"class_path": "FullyShard", "init_args": sharding})
    if appliers:
        options["appliers"] = appliers
    return {"class_path": "MeshStrategy", "init_args": options}


def _class_name(entry: Any) -> str:
    path = entry.get("class_path", "") if isinstance(entry, dict) else str(entry)
    return str(path).rpartition(".")[2]


def find_part(config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the options of a config's applier or callback of a class; None without one."""
    strategy = (config.get("trainer") or {}).get("strategy")
    for entry in [*_appliers(strategy), *_callbacks(config)]:
        if _class_name(entry) == name:
            return strategy_options(entry)
    return None


def _appliers(strategy: Any) -> list[Any]:
    return strategy_options(strategy).get("appliers") or []


def _callbacks(config: dict[str, Any]) -> list[Any]:
    given = (config.get("trainer") or {}).get("callbacks") or []
    return given if isinstance(given, list) else [given]


def write_yaml(candidate: Candidate, config: dict[str, Any], nodes: int, state: StateFormat, number: int) -> str:
    """Returns a candidate's config as text, with its prediction as a comment."""
    head = [
        f"# Plan {number}: {candidate.layout}",
        f"# predicted {candidate.time.total:.3g} s a step, {candidate.throughput:,.0f} a second, MFU"
        f" {candidate.mfu:.1%}, {candidate.memory.total / 1e9:.1f} GB a rank",
        f"# why       {candidate.reason}",
    ]
    return "\n".join([*head, yaml.safe_dump(candidate_config(candidate, config, nodes, state), sort_keys=False)])


#: ZeRO stage of strategies without a mesh, by class or short name; None for the option `stage`.
_STAGES = {
    **{"auto": 0, "ddp": 0, "DDPStrategy": 0, "SingleDeviceStrategy": 0, "fsdp": 3, "FSDPStrategy": 3},
    **{"zero1": 1, "zero2": 2, "zero3": 3, "ZeroStrategy": None},
}


#: Default micro-batches of a pipeline for each of its ranks.
_MICRO_BATCHES = 4


def read_dtypes(config: dict[str, Any], device: str) -> tuple[str | None, str | None]:
    """Returns the dtypes of gathered parameters and of reduced gradients; None for those of the precision."""
    strategy, precision = (config.get("trainer") or {}).get("strategy"), read_precision(config)
    options = find_part(config, "FullyShard") or strategy_options(strategy)
    gathered = options.get("param_dtype")
    if gathered is None and precision.endswith("-mixed"):
        gathered = default_param_dtype(precision, torch.device(device)) or "float32"
    return gathered, options.get("reduce_dtype")


def read_precision(config: dict[str, Any]) -> str:
    """Returns the Trainer's precision by its full name."""
    given = str((config.get("trainer") or {}).get("precision") or "32-true")
    return {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}.get(given, given)


def read_layout(config: dict[str, Any], ranks: int) -> Layout:
    """Returns the layout of a run; that of a run with Rotor has recomputation by blocks, and a budget still of 0.

    Args:
        config: Merged config of the run.
        ranks: Number of ranks.

    Raises:
        DloError: The strategy is one that is not predicted, or the config does not say the batch.
    """
    strategy = (config.get("trainer") or {}).get("strategy") or "auto"
    name, options = _class_name(strategy), strategy_options(strategy)
    rotor = find_part(config, "Rotor")
    offload = bool((rotor or {}).get("offload"))
    batch = read_batch(config)
    if batch is None:
        raise DloError("a predicted run must have data.init_args.batch_size, got none; set it, or measure a run")
    accumulated = (config.get("trainer") or {}).get("accumulate_grad_batches") or 1
    if name in ("mesh", "MeshStrategy"):
        layout = _mesh_layout(options, ranks, batch, accumulated)
        return layout if rotor is None else replace(layout, recompute="rotor", every=1, offload=offload)
    if name not in _STAGES:
        raise DloError(
            f"predictions are for auto, ddp, zero1 to zero3, fsdp and mesh, all in the device's memory, got {name};"
            " measure a run"
        )
    known = _STAGES[name]
    stage = int(options.get("stage", 1)) if known is None else known
    if stage == 3 and options.get("reshard_after_forward") is False:
        stage = 2
    spec = MeshSpec(dp_shard=ranks) if stage else MeshSpec(dp_replicate=ranks, dp_shard=1)
    recompute = "full" if options.get("recompute") or _init_args(config, "model").get("recompute") else "none"
    recompute = recompute if rotor is None else "rotor"
    rows, zero = batch // accumulated // ranks, stage if ranks > 1 else 0
    return Layout(spec, rows, accumulated, zero=zero, recompute=recompute, offload=offload)


def _mesh_layout(options: dict[str, Any], ranks: int, batch: int, accumulated: int) -> Layout:
    sizes = {axis: options.get(axis, -1 if axis == "dp_shard" else 1) for axis in AXES}
    spec = MeshSpec(**sizes, ep=options.get("ep") or 1).resolve(ranks)
    appliers = {_class_name(applier): strategy_options(applier) for applier in options.get("appliers") or []}
    sharding, recomputation = appliers.get("FullyShard", {}), appliers.get("ActivationCheckpoint")
    keeps = sharding.get("reshard_after_forward") is False
    count = accumulated
    if spec.pp > 1:
        count = options.get("micro_batches") or _MICRO_BATCHES * spec.pp
    rows = batch // accumulated // spec.data_size // (count if spec.pp > 1 else 1)
    split = options.get("split")
    mode = "none" if recomputation is None else str(recomputation.get("mode", "full"))
    if sharding.get("recompute"):
        mode = "full"
    schedule, chunks = options.get("schedule") or "1F1B", 1
    if spec.pp > 1:
        chunks = make_placement(schedule, spec.pp, options.get("stages_per_rank")).stages_per_rank
    layout = Layout(
        spec, rows, count, schedule, chunks,
        tuple(split) if split else None, (2 if keeps else 3) if spec.dp_shard * spec.cp > 1 else 0,
        bool(sharding.get("sync_every_micro_batch")), bool(options.get("sequence_parallel")), mode,
        int((recomputation or {}).get("every") or 1),
    )  # fmt: skip
    # Two versions of full weights, and shards of the optimizer's state.
    return replace(layout, zero=int(spec.dp_shard * spec.cp > 1)) if layout.delays else layout


def layout_or_one_rank(config: dict[str, Any], ranks: int | None) -> Layout:
    """Returns the layout of a run, or that of one rank with all of the model where it is not predicted.

    Args:
        config: Merged config of the run.
        ranks: Number of ranks; None if it is not known.
    """
    try:
        if ranks is not None:
            return read_layout(config, ranks)
    except DloError:  # Another strategy.
        pass
    return Layout(MeshSpec(dp_shard=1), max(1, (read_batch(config) or 8) // (ranks or 1)), zero=0)
