"""Plans a run from its config, and reports the plans as text, JSON and configs.

The fastest plans run on simulated ranks: their strategy is built, each kind of rank runs a step, and state is counted.
A step runs the code of a run on fake tensors (:mod:`dlo_plugins.parallel.mesh.mesh_simulation`), with fewer equal
blocks. Its mesh has the same axes, of their smallest factors but for `tp`: all sizes of the others run the same code.
State is counted from the shapes of each rank's shards. A layout's even shares leave out rows that ranks do not divide.
"""

from __future__ import annotations

import argparse
import copy
import io
import math
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

from dlo_framework.cli.lightning_cli import DloParser
from dlo_framework.errors import DloError
from dlo_framework.mesh import Coordinates, MeshSpec
from dlo_framework.task import Task
from dlo_framework.units import format_bytes
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh.mesh_simulation import dry_run_step, fewest_micro_batches, simulated_precision
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.plan.layout import SIZES, Request, StateFormat
from dlo_plugins.plan.machine import Machine, load_machine
from dlo_plugins.plan.measurement import measure_machine, write_machine
from dlo_plugins.plan.model_profile import ModelProfile
from dlo_plugins.plan.plan_config import find_part, mesh_strategy, read_batch, read_device, strategy_options, write_yaml
from dlo_plugins.plan.plan_search import Candidate, PlanSearch, Rejection, SearchResult, summarise_rejections
from dlo_plugins.plan.rank_memory import RankMemory
from dlo_plugins.plan.run_memory import OptimizerState, profile_run, run_state

#: What the figures lack, by the class of a part of the config.
_PARTS = {
    "LowPrecision": "products in 8 bits; they have the rate of the Trainer's precision",
    "Quantise": "the rounding of weights and inputs in training",
    "GradientCompression": "compression: gradients are reduced in full, and its buffers take no memory",
    "WeightEMA": "the average of the weights: another copy of each rank's trained parameters",
    "DiLoCo": "outer steps: ranks are taken to reduce gradients each step, and its copies take no memory",
    "Prune": "masks and removed weights; the model is the one before pruning",
    "Freeze": "parameters that are frozen in part of the run; all are taken to train",
    "LayerDrop": "blocks that are left out; all of them run",
    "StochasticDepthSchedule": "branches that are left out; all of them run",
    "TokenDrop": "tokens that are left out; all of them are computed",
    "SequenceLength": "shorter sequences in part of the run; rows have the data's full length",
    "ProgressiveResizing": "smaller images in part of the run; they have their full size",
    "DynamicBatchSize": "other batch sizes in part of the run",
    "MicroBatchFinder": "its own choice of the micro-batch, which replaces the plan's; leave it out",
}


def find_unmodelled(config: dict[str, Any], optimizer: OptimizerState, second_models: int = 0) -> list[str]:
    """Returns a sentence for each part of a run that the figures lack.

    Args:
        config: Config of the user.
        optimizer: State of the run's optimizer.
        second_models: Number of second models, such as a teacher.
    """
    sentences = []
    for name, what in _PARTS.items():
        options = find_part(config, name)
        rounds = name != "Quantise" or (options or {}).get("when") == "aware"
        if options is not None and rounds:
            sentences.append(f"{name}: {what}")
    strategy = strategy_options((config.get("trainer") or {}).get("strategy"))
    if strategy.get("async_tp"):
        sentences.append("async_tp: communication of tp that overlaps computation; all of it is exposed")
    if second_models:
        sentences.append("the second model, such as a teacher: its parameters take memory, and its forward time")
    if optimizer.error:
        sentences.append(
            f"the optimizer, which could not be built without a trainer ({optimizer.error}): Adam's two moments"
        )
    if optimizer.kind != "elementwise":
        sentences.append(
            f"{optimizer.name}: computation beyond what it reads and writes, full gradients for its step, and"
            " uneven shares: under sharding each rank steps full tensors"
        )
    return sentences


@dataclass(frozen=True)
class PlannedRun:
    """Plans of a run.

    Attributes:
        profile: Profile of its model.
        machine: Machine.
        request: Resources and wishes.
        nodes: Number of nodes.
        result: Result of the search.
        config: Config of the user.
        state: Bytes of the run's tensors.
        unmodelled: Sentences on what of the run is not in the figures.
    """

    profile: ModelProfile
    machine: Machine
    request: Request
    nodes: int
    result: SearchResult
    config: dict[str, Any]
    state: StateFormat
    unmodelled: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> list[Path]:
        """Writes each plan as a config, `plan_1.yaml` and so on, and returns the files.

        Raises:
            DloError: The folder cannot be written, or the config has no batch size to set.
        """
        texts = [write_yaml(c, self.config, self.nodes, self.state, n) for n, c in enumerate(self.result.candidates, 1)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files = [folder / f"plan_{number}.yaml" for number in range(1, len(texts) + 1)]
            for file, text in zip(files, texts, strict=True):
                file.write_text(text)
        except OSError as error:
            raise DloError(f"plan: --out must be a folder that can be written, got {folder}: {error}") from error
        return files


def plan_run(
    config: dict[str, Any], model: Any, datamodule: Any, gpus: int, nodes: int | None, options: argparse.Namespace,
    second_models: int = 0,
) -> PlannedRun:  # fmt: skip
    """Returns the plans of a run.

    Args:
        config: Config of the user.
        model: Task or LightningModule of the config, without recomputation.
        datamodule: Datamodule of the config, or None.
        gpus: Number of GPUs of all nodes.
        nodes: Number of nodes; None for as few as the machine allows.
        options: Checked options of `dlo plan`.
        second_models: Number of second models, such as a teacher.

    Raises:
        DloError: The model cannot be profiled, no layout is possible, or nothing fits.
    """
    batch = options.batch or read_batch(config)
    if batch is None:
        raise DloError(
            "plan: --batch must be the rows of a step where data.init_args.batch_size does not say, got none; set"
            " --batch 256"
        )
    state, optimizer = run_state(config, model, options.fix.get("gather"), options.fix.get("reduce"))
    if options.measure is not None:
        options.machine = measure_here(config, state, gpus, options.out)
    machine = load_machine(options.machine)
    nodes = nodes or -(-gpus // machine.ranks_per_node)
    if gpus % nodes:
        fix = f"set --gpus {gpus // nodes * nodes}" if gpus > nodes else f"set --nodes {gpus}"
        raise DloError(f"plan: --gpus must be divisible by --nodes, got {gpus} and {nodes}; {fix}")
    machine = replace(machine, ranks_per_node=gpus // nodes)
    machine.rate(state.compute)
    whole = find_part(config, "Compile")
    rotor = whole is None or whole.get("scope") == "blocks"
    request = Request(gpus, options.memory or machine.memory, batch, options.fix, options.top, rotor)
    profile = profile_run(model, datamodule, state, machine.device)
    verify = None
    if isinstance(model, Task) and profile.blocks:
        verify = RankVerification(model.on_meta(), datamodule, config, nodes, state, request.memory)
    result = PlanSearch(profile, machine, state, request).run(verify)
    unmodelled = find_unmodelled(config, optimizer, second_models)
    return PlannedRun(profile, machine, request, nodes, result, config, state, unmodelled)


def measure_here(config: dict[str, Any], state: StateFormat, gpus: int, out: Path | None) -> str:
    """Measures this machine for a config, writes a machine file, and returns its path."""
    path = (out or Path()) / "machine.yaml"
    write_machine(measure_machine(state.compute, gpus, read_device(config)), path)
    return str(path)


def report_json(planned: PlannedRun) -> dict[str, Any]:
    """Returns the plans and the nearest rejections as JSON data."""
    return {
        "machine": planned.machine.name,
        "gpus": planned.request.gpus,
        "nodes": planned.nodes,
        "memory": planned.request.memory,
        "global_batch": planned.request.global_batch,
        "parameters": planned.profile.parameters,
        "layouts": planned.result.count,
        "not_in_figures": planned.unmodelled,
        "plans": [candidate.to_json() for candidate in planned.result.candidates],
        "rejected": [
            {"layout": str(r.layout), "kind": r.kind, "value": r.value, "limit": r.limit, "text": str(r)}
            for r in _nearest(planned)
        ],
    }


def report_text(planned: PlannedRun) -> str:
    """Returns the plans and the nearest rejections as text."""
    request, profile = planned.request, planned.profile
    unit = "tokens/s" if profile.length else "rows/s"
    lines = [
        f"{profile.model}, {profile.parameters:,} parameters, on {request.gpus} {planned.machine.name}"
        f" with {request.memory / 1e9:.4g} GB, {planned.nodes} node{'s' * (planned.nodes > 1)}, {request.global_batch}"
        " rows a step",
        f"{planned.result.count:,} layouts, of which {len(planned.result.rejections):,} were rejected",
        "",
    ]
    for number, candidate in enumerate(planned.result.candidates, 1):
        lines += _candidate_lines(number, candidate, unit)
    lines += [f"not in the figures: {what}" for what in planned.unmodelled]
    rejected = [f"  {rejection}" for rejection in _nearest(planned)]
    lines += ["", "rejected, the nearest:", *rejected] if rejected else []
    sizes = {f"tp={size}" for size in range(2, request.gpus + 1) if request.gpus % size == 0} | {"tp"}
    lines += [f"  {why}" for key, why in profile.why_not.items() if key in sizes][:2]
    return "\n".join(lines)


def _nearest(planned: PlannedRun) -> list[Rejection]:
    result = planned.result
    return summarise_rejections(result.rejections, result.candidates[0].time.total)


def _candidate_lines(number: int, candidate: Candidate, unit: str) -> list[str]:
    time, memory = candidate.time, candidate.memory
    seconds = [f"{name} {value / time.total:.0%}" for name, value in vars(time).items() if value / time.total >= 0.005]
    parts = [
        f"{f.name} {getattr(memory, f.name) / 1e9:.1f}" for f in fields(RankMemory) if getattr(memory, f.name) > 5e7
    ]
    return [
        f"{number}. {candidate.layout}",
        f"   {time.total:.3g} s a step, {candidate.throughput:,.0f} {unit}, MFU {candidate.mfu:.1%}:"
        f" {', '.join(seconds)}",
        f"   {memory.total / 1e9:.1f} GB a rank: {', '.join(parts)}"
        + (f"; {format_bytes(candidate.host_bytes)} on the host" if candidate.host_bytes else ""),
        f"   {candidate.reason}" + ("; simulated ranks run it" if candidate.is_verified else ""),
        *([f"   {candidate.caveat}"] if candidate.caveat else []),
    ]


#: Classes that a plan names; the parser finds those that have been imported, as a config's own have been.
PLANNED = (MeshStrategy, FullyShard, ActivationCheckpoint)


def shorten_axes(mesh: MeshSpec) -> MeshSpec:
    """Returns a mesh with the same axes, each but `tp` of its smallest factor above 1.

    Under `ep`, `dp_shard` is larger where several ranks share one rank's experts.
    """

    def smallest(size: int) -> int:
        return next((factor for factor in range(2, math.isqrt(size) + 1) if size % factor == 0), size)

    shortened = MeshSpec(**{axis: size if axis == "tp" else smallest(size) for axis, size in mesh.sizes.items()})
    if mesh.ep == 1:
        return shortened
    shortened = replace(shortened, ep=smallest(mesh.ep))
    for size in range(shortened.dp_shard, mesh.dp_shard + 1):
        tried = replace(shortened, dp_shard=size)
        divides = mesh.dp_shard % size == 0 and size * shortened.cp % shortened.ep == 0
        if divides and (tried.expert_shards > 1) == (mesh.expert_shards > 1):
            return tried
    return mesh


class RankVerification:
    """Verifies candidates of one run on simulated ranks.

    Args:
        task: Task with its model on the meta device.
        datamodule: Datamodule of the config.
        config: Config of the user.
        nodes: Number of nodes.
        state: Bytes of the run's tensors.
        memory: Bytes of a rank.
    """

    def __init__(
        self, task: Task, datamodule: Any, config: dict[str, Any], nodes: int, state: StateFormat, memory: float
    ) -> None:
        self._task, self._datamodule, self._nodes, self._state = task, datamodule, nodes, state
        trainer = config.get("trainer") or {}
        self._before, self._precision = trainer.get("strategy"), trainer.get("precision")
        self._memory = memory
        self._dry_runs: set[str] = set()

    def __call__(self, candidate: Candidate, ranks: list[RankMemory]) -> Candidate | Rejection:
        """Returns the candidate with the memory that its shards take, or why it cannot run.

        ZeroStrategy's plans have no mesh, and come back unverified.

        Args:
            candidate: Candidate.
            ranks: Predicted memory of each rank of its pipeline.
        """
        layout = candidate.layout
        if layout.uses_zero_strategy:
            return candidate
        try:
            small = shorten_axes(layout.mesh)
            # A run prints torch's warnings; torch prints some failures, which are refused here with their message.
            printed = io.StringIO()
            with warnings.catch_warnings(), redirect_stdout(printed), redirect_stderr(printed):
                warnings.simplefilter("ignore")
                self._dry_run_step(candidate, small)
                strategy = self._strategy(self._options(candidate), layout.mesh.world_size, self._nodes)
                excess = self._excess(strategy, candidate, ranks)
        except DloError as error:
            return Rejection(layout, "refused", 1.0, 1.0, str(error))
        memory = candidate.memory
        if excess > 0:
            memory = replace(memory, parameters=memory.parameters + excess)
        if memory.total > self._memory:
            return Rejection(layout, "memory", memory.total, self._memory)
        return replace(candidate, memory=memory, is_verified=True)

    def _dry_run_step(self, candidate: Candidate, mesh: MeshSpec) -> None:
        """Runs a step of a candidate's strategy on a mesh with other sizes of its axes, once where steps are equal.

        It has no split, so that equal blocks can be left out.

        Raises:
            DloError: A rank cannot run it.
        """
        options = {**self._options(candidate), **mesh.sizes, "ep": mesh.ep, "split": None}
        strategy = self._strategy(options, mesh.world_size, 1)
        step = repr({**options, "micro_batches": fewest_micro_batches(strategy.pipelining, mesh)})
        if step not in self._dry_runs:
            dry_run_step(strategy, self._task, mesh, self._datamodule, shortened_only=True)
            self._dry_runs.add(step)

    def _options(self, candidate: Candidate) -> dict[str, Any]:
        """Returns the options of the strategy that the candidate's config has."""
        options: dict[str, Any] = mesh_strategy(candidate, copy.deepcopy(self._before), self._state)["init_args"]
        return options

    def _strategy(self, options: dict[str, Any], ranks: int, nodes: int) -> MeshStrategy:
        """Returns a strategy with these options."""
        parser = DloParser()
        parser.add_argument("--strategy", type=Strategy)
        entry = {"class_path": "MeshStrategy", "init_args": options}
        strategy: MeshStrategy = parser.instantiate_classes(parser.parse_object({"strategy": entry})).strategy
        strategy.precision_plugin = simulated_precision(self._precision)
        strategy.num_nodes = nodes
        strategy.parallel_devices = [torch.device("cpu")] * (ranks // nodes)
        return strategy

    def _excess(self, strategy: MeshStrategy, candidate: Candidate, ranks: list[RankMemory]) -> float:
        """Returns the bytes by which counted parameters and Adam's state raise the largest rank's prediction."""
        spec, described = candidate.layout.mesh, strategy.describe(self._task, self._datamodule)
        element, totals = SIZES["bfloat16" if self._precision in ("bf16-true", "16-true") else "float32"], []
        is_rounded = strategy.bf16_weights == "stochastic"
        stored, state = (SIZES["bfloat16"], SIZES["float32"]) if is_rounded else (element, element)
        for stage, predicted in enumerate(ranks):
            counted = described.ranks[spec.rank(Coordinates(stage, 0, 0, 0, 0))].state_bytes
            # Counted are Adam's two moments.
            parameters = counted.parameters * self._state.parameter / stored
            optimizer = counted.optimizer * self._state.state / (2 * state)
            more = max(0.0, parameters + optimizer - predicted.parameters - predicted.optimizer)
            totals.append(predicted.total + more)
        return max(totals) - candidate.memory.total
