"""Orders the appliers of a run by phase: the user's, and those that the mesh's axes need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from dlo_framework.applier import Applier
from dlo_framework.errors import DloError
from dlo_plugins.parallel.context.context_parallel import ContextParallel
from dlo_plugins.parallel.experts.expert_parallel import ExpertParallel
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel


@dataclass
class MeshAppliers:
    """Appliers of a run on a mesh.

    Attributes:
        tensor: Applier of the axis `tp`.
        context: Applier of the axis `cp`.
        experts: Applier of the axis `ep`.
        shard: Applier of the data axes.
        ordered: All appliers, in the order of their phases.
    """

    tensor: TensorParallel
    context: ContextParallel
    experts: ExpertParallel
    shard: FullyShard
    ordered: list[Applier]

    @classmethod
    def from_options(
        cls,
        given: Sequence[Applier],
        cp_method: Literal["ring", "ulysses"],
        sequence_parallel: bool,
        async_tp: bool | int = False,
    ) -> MeshAppliers:
        """Returns the user's appliers, and those of the axes that the user has not given.

        Args:
            given: Appliers of the user.
            cp_method: Method of ContextParallel, unless the user gives that applier.
            sequence_parallel: Option of TensorParallel, unless the user gives that applier.
            async_tp: Option of TensorParallel, unless the user gives that applier.

        Raises:
            DloError: Two appliers have one class, an object is not an applier, or the options contradict each other.
        """
        for applier in given:
            if not isinstance(applier, Applier):
                raise DloError(
                    f"appliers must derive from dlo_framework.applier.Applier, got a {type(applier).__name__}; derive"
                    " its class from Applier"
                )
        kinds = [type(applier) for applier in given]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice is not None:
            raise DloError(f"appliers must have different classes, got {twice.__name__} twice; leave one out")
        tensor = _first(given, TensorParallel) or TensorParallel(sequence_parallel, async_tp)
        context = _first(given, ContextParallel) or ContextParallel(method=cp_method)
        experts = _first(given, ExpertParallel) or ExpertParallel()
        shard = _first(given, FullyShard) or FullyShard()
        missing = [applier for applier in (tensor, context, experts, shard) if applier not in given]
        return cls(tensor, context, experts, shard, sorted([*given, *missing], key=lambda applier: applier.phase))


Kind = TypeVar("Kind", bound=Applier)


def _first(appliers: Sequence[Applier], kind: type[Kind]) -> Kind | None:
    return next((applier for applier in appliers if isinstance(applier, kind)), None)
