"""Layout, memory and blocks of a run, from its config: the opposite of :mod:`~dlo_plugins.plan.plan_config`."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

from dlo_framework.errors import DloError
from dlo_framework.mesh import AXES, MeshSpec
from dlo_framework.task import Task
from dlo_plugins.memory.planning import MeasuredRank
from dlo_plugins.parallel.pipeline.pipeline_schedules import make_placement
from dlo_plugins.plan.layout import Layout
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.plan_config import find_part, read_batch, read_device, strategy_options
from dlo_plugins.plan.plan_report import profile_run, run_state
from dlo_plugins.plan.rank_memory import MemoryModel, in_flight
from dlo_plugins.plan.rotor_model import RotorModel
from dlo_plugins.plan.step_time import TimeModel

#: ZeRO stage of strategies without a mesh, by class or short name; None for the option `stage`.
_STAGES = {
    **{"auto": 0, "ddp": 0, "DDPStrategy": 0, "SingleDeviceStrategy": 0, "fsdp": 3, "FSDPStrategy": 3},
    **{"zero1": 1, "zero2": 2, "zero3": 3, "ZeroStrategy": None},
}
#: Default micro-batches of a pipeline for each of its ranks.
_MICRO_BATCHES = 4


def read_dtypes(config: dict[str, Any], device: str) -> tuple[str | None, str | None]:
    """Returns the dtypes of gathered parameters and of reduced gradients; None for those of the precision."""
    trainer = config.get("trainer") or {}
    options = find_part(config, "FullyShard") or strategy_options(trainer.get("strategy"))
    gathered = options.get("param_dtype")
    if gathered is None and device == "cpu" and str(trainer.get("precision")).startswith("bf16"):
        gathered = None if str(trainer["precision"]) == "bf16-true" else "float32"  # The default of a CPU.
    return gathered, options.get("reduce_dtype")


def read_layout(config: dict[str, Any], ranks: int) -> Layout:
    """Returns the layout of a run; that of a run with Rotor has recomputation by blocks, and a budget still of 0.

    Args:
        config: Merged config of the run.
        ranks: Number of ranks.

    Raises:
        DloError: The strategy is one that is not predicted, or the config does not say the batch.
    """
    strategy = (config.get("trainer") or {}).get("strategy") or "auto"
    entry: dict[str, Any] = strategy if isinstance(strategy, dict) else {"class_path": strategy}
    name = str(entry.get("class_path", "")).rpartition(".")[2]
    options: dict[str, Any] = entry.get("init_args") or {}
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
    recompute = "full" if options.get("recompute") or _recomputes(config) else "none"
    recompute = recompute if rotor is None else "rotor"
    rows, zero = batch // accumulated // ranks, stage if ranks > 1 else 0
    return Layout(spec, rows, accumulated, zero=zero, recompute=recompute, offload=offload)


def _mesh_layout(options: dict[str, Any], ranks: int, batch: int, accumulated: int) -> Layout:
    sizes = {axis: options.get(axis, -1 if axis == "dp_shard" else 1) for axis in AXES}
    spec = MeshSpec(**sizes, ep=options.get("ep") or 1).resolve(ranks)
    appliers = {}
    for applier in options.get("appliers") or []:
        named = applier if isinstance(applier, dict) else {"class_path": applier}
        appliers[str(named["class_path"]).rpartition(".")[2]] = named.get("init_args") or {}
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
    found = Layout(
        spec, rows, count, schedule, chunks,
        tuple(split) if split else None, (2 if keeps else 3) if spec.dp_shard * spec.cp > 1 else 0,
        bool(sharding.get("sync_every_micro_batch")), bool(options.get("sequence_parallel")), mode,
        int((recomputation or {}).get("every") or 1),
    )  # fmt: skip
    # Two versions of full weights, and shards of the optimizer's state.
    return replace(found, zero=int(spec.dp_shard * spec.cp > 1)) if found.delays else found


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


def _recomputes(config: dict[str, Any]) -> bool:
    model = config.get("model")
    return isinstance(model, dict) and bool((model.get("init_args") or {}).get("recompute"))


def predict_rank_memory(
    config: dict[str, Any], model: Any, datamodule: Any, ranks: int, device: str
) -> dict[str, float]:
    """Returns the bytes of the rank that needs most, by part; parts of no bytes are left out.

    Args:
        config: Config as the user means it, without Lightning's defaults.
        model: Task or LightningModule of the config.
        datamodule: Datamodule of the config, or None.
        ranks: Number of ranks.
        device: Type of device.

    Raises:
        DloError: The strategy, the precision or the model is not predicted.
    """
    layout = read_layout(config, ranks)
    if isinstance(model, Task) and getattr(model, "recompute", False) and not model.has_model:
        model = copy.copy(model)
        model.recompute = False  # The layout has it.
    state, _ = run_state(config, model, *read_dtypes(config, device))
    machine = load_machine("h100" if device == "cuda" else "cpu")
    profile = profile_run(model, datamodule, state, machine.device)
    found = MemoryModel(TimeModel(profile, machine, state)).largest(layout)
    return {name: size for name, size in vars(found).items() if size > 0}


def predict_chains(
    config: dict[str, Any], model: Any, datamodule: Any, ranks: int, rows: int | None
) -> list[MeasuredRank]:
    """Returns the predicted chains of one rank of each place in the pipeline of a run.

    Args:
        config: Config of the user.
        model: Task of the config.
        datamodule: Datamodule of the config, or None.
        ranks: Number of ranks.
        rows: Rows of a micro-batch on a rank; None for the config's.

    Raises:
        DloError: The model is not a task with blocks, or its step cannot run without values.
    """
    if not isinstance(model, Task):
        raise DloError(
            f"remat: the model must be a dlo_framework.Task, whose inputs are known, got {type(model).__name__}; start"
            " a run with the callback Rotor, which measures any model"
        )
    device = read_device(config)
    state, _ = run_state(config, model, *read_dtypes(config, device))
    profile = profile_run(model, datamodule, state, device)
    task = model.on_meta()
    names = task.parallel_plan().block_names(task.model)
    if not names:
        raise DloError(
            f"remat: the parallel plan must name blocks, got none of {type(model).__name__}; name them in"
            " Task.parallel_plan: ParallelPlan(blocks=(...))"
        )
    layout = replace(layout_or_one_rank(config, ranks), recompute="none", every=1)
    layout = layout if rows is None else replace(layout, micro_batch=rows)
    times = TimeModel(profile, load_machine("h100"), state)
    memory, at, chains = MemoryModel(times), 0, []
    for own in RotorModel(times, memory).chains(layout):
        chain = own.measured.chain
        named = (replace(stage, name=name) for stage, name in zip(chain.stages, names[at:], strict=False))
        at += len(chain) - 1
        stages = (*itertools.islice(named, len(chain) - 1), chain.stages[-1])
        chains.append(replace(own.measured, chain=replace(chain, stages=stages)))
    return [
        MeasuredRank(tuple(replace(chains[s], in_flight=n) for s, n in zip(one.stages, one.most, strict=True)), 0)
        for one in in_flight(layout)
    ]
