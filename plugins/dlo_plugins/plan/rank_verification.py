"""Verifies plans on simulated ranks: their strategy is built, each kind of rank runs a step, and state is counted.

A step runs the code of a run on fake tensors (:mod:`dlo_plugins.parallel.mesh.mesh_simulation`), with fewer equal
blocks. Its mesh has the same axes, of their smallest factors but for `tp`: all sizes of the others run the same code.
State is counted from the shapes of each rank's shards. A layout's even shares leave out rows that ranks do not
divide.
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

from dlo_framework.cli.lightning_cli import DloParser
from dlo_framework.errors import DloError
from dlo_framework.mesh import Coordinates, MeshSpec
from dlo_framework.task import Task
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh.mesh_simulation import fewest_micro_batches, rehearse_step, simulated_precision
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.plan.layout import SIZES, StateFormat
from dlo_plugins.plan.plan_config import mesh_strategy
from dlo_plugins.plan.plan_search import Candidate, Rejection
from dlo_plugins.plan.rank_memory import RankMemory

#: Classes that a plan names; the parser finds those that have been imported, as a config's own have been.
PLANNED = (MeshStrategy, FullyShard, ActivationCheckpoint)


def shorten_axes(mesh: MeshSpec) -> MeshSpec:
    """Returns a mesh with the same axes, each but `tp` of its smallest factor above 1.

    Under `ep`, `dp_shard` is larger where several ranks share one rank's experts.
    """

    def smallest(size: int) -> int:
        return next((factor for factor in range(2, math.isqrt(size) + 1) if size % factor == 0), size)

    found = MeshSpec(**{axis: size if axis == "tp" else smallest(size) for axis, size in mesh.sizes.items()})
    if mesh.ep == 1:
        return found
    found = replace(found, ep=smallest(mesh.ep))
    for size in range(found.dp_shard, mesh.dp_shard + 1):
        tried = replace(found, dp_shard=size)
        divides = mesh.dp_shard % size == 0 and size * found.cp % found.ep == 0
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
        self._rehearsed: set[str] = set()

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
                self._rehearse(candidate, small)
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

    def _rehearse(self, candidate: Candidate, mesh: MeshSpec) -> None:
        """Runs a step of a candidate's strategy on a mesh with other sizes of its axes, once where steps are equal.

        It has no split, so that equal blocks can be left out.

        Raises:
            DloError: A rank cannot run it.
        """
        options = {**self._options(candidate), **mesh.sizes, "ep": mesh.ep, "split": None}
        strategy = self._strategy(options, mesh.world_size, 1)
        step = repr({**options, "micro_batches": fewest_micro_batches(strategy.pipelining, mesh)})
        if step not in self._rehearsed:
            rehearse_step(strategy, self._task, mesh, self._datamodule, shortened_only=True)
            self._rehearsed.add(step)

    def _options(self, candidate: Candidate) -> dict[str, Any]:
        """Returns the options of the strategy that the candidate's config has."""
        options: dict[str, Any] = mesh_strategy(candidate, copy.deepcopy(self._before), self._state)["init_args"]
        return options

    def _strategy(self, options: dict[str, Any], ranks: int, nodes: int) -> MeshStrategy:
        """Returns a strategy with these options."""
        parser = DloParser()
        parser.add_argument("--strategy", type=Strategy)
        found = {"class_path": "MeshStrategy", "init_args": options}
        strategy: MeshStrategy = parser.instantiate_classes(parser.parse_object({"strategy": found})).strategy
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
