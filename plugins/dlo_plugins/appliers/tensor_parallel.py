"""The applier `TensorParallel`: each rank of the mesh's axis `tp` gets a part of each layer.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053. Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022,
arXiv 2205.05198 (`sequence_parallel`). Departures: see :mod:`dlo_plugins.tensor`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from dlo_framework.applier import Applier, Phase

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from dlo_framework.distributed.collectives import Communicator
    from dlo_framework.plan import ParallelPlan
    from dlo_plugins.tensor.coverage import Coverage
    from dlo_plugins.tensor.sequence import Sequence

AXIS = "tp"


class TensorParallel(Applier):
    """Cuts the heads of attentions, the hidden features of MLPs and the vocabulary over the axis `tp`.

    Which is cut how, the model's :class:`ParallelPlan` says. Attention and MLP each pass one all-reduce of their
    output in forward and one of their input's gradient in backward. Parameters become smaller ones; which part of the
    whole they are, and which of the uncut ones get a part of their gradient only, is in
    :func:`dlo_framework.cuts.layout_of`: the gradients of its `partial` have to be summed over the axis
    before the optimizer steps. All ranks of the axis see the same batches and start from the same seed.

    Args:
        sequence_parallel: whether each rank keeps a part of the tokens between the cut projections: norms, dropout and
            residuals then take a part of the memory, for the same number of elements passed. For activations
            `[batch, sequence, width]`.

    Attributes:
        communicator: counts what passes; None before :meth:`apply`.
    """

    phase = Phase.TENSOR

    def __init__(self, sequence_parallel: bool = False) -> None:
        self.sequence_parallel = sequence_parallel
        self.communicator: Communicator | None = None
        self._stream: Sequence | None = None

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Cuts a model in place; it may be on the meta device.

        Args:
            module: the model; whole, and the same on each rank of the axis.
            mesh: with an axis `tp`.
            plan: of the model, relative to it.

        Raises:
            DloError: if the model cannot be cut so.
        """
        from dlo_framework.distributed.collectives import Communicator
        from dlo_plugins.tensor import cutting, norms, regions, vocabulary
        from dlo_plugins.tensor.local_random import LocalRandom
        from dlo_plugins.tensor.sequence import Sequence
        from dlo_plugins.tensor.survey import survey

        communicator = Communicator(mesh[AXIS].get_group())
        if communicator.size == 1:
            return
        self.communicator = communicator
        found = survey(module, plan, communicator.size, self.sequence_parallel)
        cutting.cut(module, found, communicator.size, communicator.rank)
        random = LocalRandom(communicator.rank)
        self._stream = stream = Sequence(communicator, random) if self.sequence_parallel else None
        for name, region in found.regions.items():
            around = module.get_submodule(name)
            columns = [module.get_submodule(column) for column in region.columns]
            rows = [module.get_submodule(row) for row in region.rows]
            regions.install(around, columns, rows, regions.Region(around, communicator, random, stream))
            for norm in region.norms:
                size = found.divisions[f"{norm}.weight"].pieces[0]
                norms.install(module.get_submodule(norm), size, communicator)
        for name in found.vocabulary:
            size = sum(found.divisions[f"{name}.weight"].pieces)
            vocabulary.install(module.get_submodule(name), size, communicator)
        if stream is not None:
            stream.install(module, plan.block_names(module))

    def part_stages(self, module: nn.Module, plan: ParallelPlan, starts: Collection[str]) -> None:
        """Makes what stages of a pipeline send each other whole, where it would be split along the sequence.

        Args:
            module: the model, to which :meth:`apply` has been applied.
            plan: of the model.
            starts: names of the blocks at which stages begin, but for the first.
        """
        if self._stream is not None:
            self._stream.part_stages(module, plan.block_names(module), starts)

    def coverage(self, module: nn.Module, plan: ParallelPlan, tp: int) -> Coverage:
        """Returns what of a model that has not been cut yet so many ranks divide.

        Raises:
            DloError: if it cannot be cut.
        """
        from dlo_plugins.tensor.coverage import coverage_of
        from dlo_plugins.tensor.survey import survey

        return coverage_of(module, survey(module, plan, tp, self.sequence_parallel).divisions)

    def check(self, module: nn.Module, plan: ParallelPlan, tp: int) -> None:
        """Checks that a model can be cut, before any process starts.

        Args:
            module: the model, which may be on the meta device; it is not changed.
            plan: of the model.
            tp: ranks of the axis.

        Raises:
            DloError: if it cannot; the message computes the nearest size that works.
        """
        from dlo_plugins.tensor.survey import survey

        if tp > 1:
            survey(module, plan, tp, self.sequence_parallel)
