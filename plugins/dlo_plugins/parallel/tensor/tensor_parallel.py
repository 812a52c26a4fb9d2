"""Implements tensor parallelism as an applier: each rank of the axis `tp` gets a slice of each layer.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053. Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022,
arXiv 2205.05198 (`sequence_parallel`). Departures: see :mod:`dlo_plugins.parallel.tensor`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.gradient_check import is_shipped
from dlo_framework.errors import DloError
from dlo_framework.plan import Applier, ParallelPlan, Phase
from dlo_plugins.parallel.tensor.installation import install_plan
from dlo_plugins.parallel.tensor.overlap import CHUNKS, AsyncProducts, reaches_peers
from dlo_plugins.parallel.tensor.sequence_parallel import LocalRandom, ShardedSequence
from dlo_plugins.parallel.tensor.tp_plan import Coverage, measure_coverage
from dlo_plugins.parallel.tensor.tp_planner import make_tp_plan

if TYPE_CHECKING:
    from dlo_plugins.parallel.tensor.inferred_rules import InferredRules

AXIS = "tp"


class TensorParallel(Applier):
    """Cuts the heads of attentions, the hidden features of MLPs and experts, and the vocabulary over the axis `tp`.

    The model's :class:`ParallelPlan` has the rule of each layer. Attention and MLP each all-reduce their output in
    forward and their input's gradient in backward. Parameters are replaced by slices, which
    :func:`dlo_framework.shards.get_layout` describes. It also lists, as `partial`, the uncut parameters whose
    gradients are partial sums: they must be summed over the axis before the optimizer steps. All ranks of the axis
    see the same batches and start from the same seed.

    Args:
        sequence_parallel: Whether each rank keeps a slice of the tokens between the cut projections, so that norms,
            dropout and residuals take a fraction of the memory; the communication volume is the same. For activations
            `[batch, sequence, width]`.
        async_tp: Whether products of linear layers overlap with the collectives of forward, chunk by chunk; a number
            sets the chunks of a product, 4 by default. On CUDA devices that reach each other's memory, torch's fused
            operators on symmetric memory replace the chunks. For code that is not compiled.

    Attributes:
        communicator: Communicator of the axis, which counts its traffic; None before :meth:`apply`.
        stream: Sequence that the ranks shard between the cut projections; None before :meth:`apply`, and without
            `sequence_parallel`.
    """

    phase = Phase.TENSOR
    axis = AXIS

    def __init__(self, sequence_parallel: bool = False, async_tp: bool | int = False) -> None:
        if async_tp is not True and async_tp != 0 and async_tp < 2:
            raise DloError(f"async_tp must be true, false or at least 2 chunks, got {async_tp}; set async_tp: true")
        self.sequence_parallel, self.async_tp = sequence_parallel, async_tp
        self.communicator: Communicator | None = None
        self.stream: ShardedSequence | None = None
        #: Inferred rules, by the names and shapes of a model's parameters; ranks get those of the launching process.
        self._inferred: dict[Any, InferredRules] = {}
        #: Rules that trying a user's rules on values has added, by the same keys; None for those not tried.
        self._tried: dict[Any, InferredRules | None] = {}

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Cuts a model in place; it may be on the meta device.

        Args:
            module: Full model, the same on each rank of the axis.
            mesh: Mesh with an axis `tp`.
            plan: Plan of the model, with names relative to it.

        Raises:
            DloError: The model cannot be cut over this number of ranks.
        """
        communicator = Communicator(mesh[AXIS].get_group())
        if communicator.size == 1:
            return
        self.communicator = communicator
        tp_plan = make_tp_plan(module, plan, communicator.size, self.sequence_parallel)
        random = LocalRandom(communicator.rank)
        self.stream = stream = ShardedSequence(communicator, random) if self.sequence_parallel else None
        products = None
        if self.async_tp:
            chunks = CHUNKS if self.async_tp is True else int(self.async_tp)
            device = torch.device(mesh.device_type)
            products = AsyncProducts(communicator, chunks, reaches_peers(communicator, device))
        install_plan(module, tp_plan, communicator, stream, products, random)
        if stream is not None:
            stream.install(module, plan.block_names(module))

    def gather_between_stages(self, module: nn.Module, plan: ParallelPlan, starts: Collection[str]) -> None:
        """Gathers the sequence between stages of a pipeline, where sequence parallelism would split it.

        Args:
            module: Model that :meth:`apply` has cut.
            plan: Plan of the model.
            starts: Names of the first blocks of all stages but the first.

        Raises:
            DloError: A block is used twice, at the end of a stage or not.
        """
        if self.stream is not None:
            blocks = plan.block_names(module, repeated=True)
            if len(blocks) > len({module.get_submodule(name) for name in blocks}):
                raise DloError(
                    "sequence_parallel does not support a block that is registered twice under pp > 1: it would gather"
                    " the sequence in each use of a stage's first and last block; set sequence_parallel: false"
                )
            self.stream.gather_between_stages(module, blocks, starts)

    def complete_plan(self, task: Any, plan: ParallelPlan, tp: int, datamodule: Any = None) -> ParallelPlan:
        """Returns a plan with tensor rules: its own, and inferred ones where it has none.

        A user's rules are tried on values. Inferred rules are those of all blocks, or, beside rules of the plan, of
        attentions and MLPs that it leaves whole; see :mod:`dlo_plugins.parallel.tensor`.

        Args:
            task: Task with its model built; it is not changed.
            plan: Plan of its model.
            tp: Number of ranks of the axis.
            datamodule: Datamodule that may know the shapes of a batch.

        Raises:
            DloError: The plan has no rules and none can be inferred, with the layers in the way; or slices by a user's
                rules do not compute what the full blocks do.
        """
        from dlo_plugins.parallel.tensor.block_proof import join_plans
        from dlo_plugins.parallel.tensor.inferred_rules import (
            has_rules,
            infer_rules,
            lacks_rules,
            try_rules,
            with_rules,
        )

        key = _shapes(task.model)
        if has_rules(plan):
            author = next(kind for kind in type(task).__mro__ if "parallel_plan" in vars(kind))
            if not is_shipped(author) or "parallel_plan" in vars(task):
                if key not in self._tried:
                    self._tried[key] = try_rules(task, plan, datamodule)
                added = self._tried[key]
                plan = plan if added is None else join_plans(plan, added.plan)
            if self.sequence_parallel or not lacks_rules(task.model, plan):
                return plan
            make_tp_plan(task.model, plan, tp)  # What the family's rules divide must be divisible.
        elif self.sequence_parallel:
            raise DloError(
                f"sequence_parallel must have the tensor rules of the model's family, got inferred ones for"
                f" {type(task.model).__name__}; leave sequence_parallel out, or set ParallelPlan(tensor=...)"
            )
        if key not in self._inferred:
            self._inferred[key] = infer_rules(task, plan, datamodule)
        inferred = self._inferred[key]
        return with_rules(plan, inferred, task.model, tp) if inferred.plan.tensor else plan

    @property
    def is_tried(self) -> bool:
        """Whether a user's rules have been tried on values, or there are none."""
        return None not in self._tried.values()

    def describe_inferred(self, model: nn.Module) -> list[str]:
        """Returns lines about the rules that were inferred for a model; none if its plan brings them."""
        inferred = self._inferred.get(_shapes(model))
        return [] if inferred is None else inferred.describe()

    def coverage(self, module: nn.Module, plan: ParallelPlan, tp: int) -> Coverage:
        """Returns the share of an uncut model that tensor parallelism over this number of ranks divides.

        Args:
            module: Full model.
            plan: Plan of the model.
            tp: Number of ranks of the axis.

        Raises:
            DloError: The model cannot be cut.
        """

        return measure_coverage(module, make_tp_plan(module, plan, tp, self.sequence_parallel).divisions)

    def check(self, module: nn.Module, plan: ParallelPlan, tp: int) -> None:
        """Checks that a model can be cut, before any process starts.

        Args:
            module: Model, which may be on the meta device; it is not changed.
            plan: Plan of the model.
            tp: Number of ranks of the axis.

        Raises:
            DloError: The model cannot be cut; the message computes the nearest size that works.
        """

        if tp > 1:
            make_tp_plan(module, plan, tp, self.sequence_parallel)


def _shapes(model: nn.Module) -> Any:
    """Returns the names and shapes of a model's parameters, the same for a copy with fewer blocks of each kind."""
    return frozenset((re.sub(r"\d+", "*", name), tuple(tensor.shape)) for name, tensor in model.named_parameters())
