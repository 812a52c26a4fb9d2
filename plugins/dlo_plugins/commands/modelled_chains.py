"""Chains of a task's blocks on one rank of a strategy, on fake tensors: without memory for the model.

Only ratios between the times of blocks matter to a schedule. Their rates are those of an H100 by its data sheet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.batches import tree_leaves
from dlo_framework.costs import known_peak, operator_flops
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.task import Task
from dlo_plugins.mesh.mesh_simulation import RankView, fix_split, repeat_rows, simulated_rank
from dlo_plugins.remat.allocation_log import AllocationLog
from dlo_plugins.remat.block_survey import BlockSurvey
from dlo_plugins.remat.planning import MeasuredChain, MeasuredRank
from dlo_plugins.strategies.mesh import MeshStrategy

#: Bytes per second of the memory.
_BYTE_RATE = 3.35e12


class OperatorCosts(TorchDispatchMode):
    """Mode that adds up the seconds of operators: the longer of their arithmetic and their traffic with the memory.

    Attributes:
        seconds: Sum since the mode was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        peak = known_peak("H100 80GB HBM3")
        assert peak is not None, "the table has it"
        self._rates = peak.rates(tf32=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator, and adds its seconds."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._overloadpacket is torch.ops.aten.detach or func.is_view:
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if tensors:
            size = min((leaf.element_size() for leaf in tensors if leaf.is_floating_point()), default=4)
            rate = self._rates["bfloat16" if size == 2 else "float32"]
            flops = operator_flops(func._overloadpacket, args, kwargs, result)
            self.seconds += max(flops / rate, sum(leaf.nbytes for leaf in tensors) / _BYTE_RATE)
        return result


def model_run(run: Any, rows: int | None) -> list[MeasuredRank]:
    """Returns the chains of one rank of each place in the pipeline of a run's strategy.

    A strategy without a mesh computes the full model on each rank.

    Args:
        run: Run with its `model`, `datamodule` and `trainer`, none of which has started.
        rows: Samples of a rank's batch; None for those of the datamodule.

    Raises:
        DloError: The model is not a task with an example batch, or its step cannot run on fake tensors.
    """
    task, data, strategy = run.model, run.datamodule, run.trainer.strategy
    if not isinstance(task, Task):
        raise DloError(
            f"remat: the model must be a dlo_framework.Task, whose inputs are known, got {type(task).__name__}; start a"
            " run with the callback Rotor, which measures any model"
        )
    ranks = run.trainer.world_size
    if isinstance(strategy, MeshStrategy):
        spec = strategy.mesh_spec()
        ranks //= spec.pp * spec.cp * spec.tp
    else:
        mesh, spec = MeshStrategy(dp_shard=1), MeshSpec(dp_shard=1)
        mesh.precision_plugin = strategy.precision_plugin
        strategy = mesh
    task = task.on_meta()
    example = task.example_batch(data)
    if example is None:
        raise DloError(
            f"remat: the task must know the shape of a batch, got None from {type(task).__name__}.example_batch;"
            " implement it"
        )
    if rows is None:
        rows = max(1, int(getattr(data, "batch_size", ranks)) // ranks)
    batch, pipelining = repeat_rows(example, rows), fix_split(task, strategy, spec, None)
    first = {spec.coordinates(rank).pp: rank for rank in reversed(range(spec.world_size))}
    return [_model_rank(task, strategy, pipelining, spec, first[place], batch) for place in range(spec.pp)]


def _model_rank(task: Task, strategy: Any, pipelining: Any, spec: MeshSpec, rank: int, batch: Any) -> MeasuredRank:
    """Returns the chains of one rank; bytes are exact, and times are modelled.

    Args:
        task: Task with its model on the meta device; it is not changed.
        strategy: MeshStrategy with its appliers, schedule and precision.
        pipelining: Split of the model into stages.
        spec: Mesh, without -1.
        rank: Rank.
        batch: Batch of one data-parallel rank, of which only shapes are used.
    """
    failure: Exception | None = None
    for own_loss in (True, False):  # A loss that reads values cannot run; then another one of the outputs does.
        try:
            with simulated_rank(task, strategy, pipelining, spec, rank, batch, own_loss=own_loss) as view:
                return MeasuredRank(_survey(view, task), 0)
        except DloError:
            raise
        except Exception as error:
            failure = error
    raise DloError(
        "remat: the step must run on fake tensors, which have no values, got"
        f" {type(failure).__name__}: {str(failure).partition(chr(10))[0][:200]}; start a run with the callback Rotor,"
        " which measures it"
    ) from failure


def _survey(view: RankView, task: Task) -> tuple[MeasuredChain, ...]:
    costs, log = OperatorCosts(), AllocationLog()
    own = [(task.parallel_plan().block_names(view.model), True)]
    if view.pipelined is not None:
        stages = view.pipelined.pipeline.stages
        numbers = view.pipelined.pipeline.own_stages
        own = [(stages.blocks_of(stage), stage + 1 == stages.count) for stage in numbers]
    surveys = []
    for names, is_last in own:
        blocks = [view.model.get_submodule(name) for name in names]
        parameters = lambda: list(view.task.parameters())
        surveys.append(BlockSurvey(blocks, names, is_last, parameters, clock=lambda: costs.seconds))
    for survey in surveys:
        survey.begin_bytes(log)
    with log:
        view.step()
        gradients = [p.grad for p in view.task.parameters() if p.grad is not None]
        for survey in surveys:
            survey.end_bytes(gradients)
            survey.times_blocks = True
    with costs:
        view.step()
    return tuple(MeasuredChain(survey.chain(), survey.stem) for survey in surveys)
