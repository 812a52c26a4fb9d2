"""Orders the appliers of a run by phase: the user's, and those that the mesh's axes need."""

from __future__ import annotations

from typing import Literal

from dlo_framework.applier import Applier
from dlo_framework.errors import DloError
from dlo_plugins.appliers.context_parallel import ContextParallel
from dlo_plugins.appliers.fully_shard import FullyShard
from dlo_plugins.appliers.tensor_parallel import TensorParallel


def order_appliers(
    given: list[Applier], cp_method: Literal["ring", "ulysses"], sequence_parallel: bool
) -> list[Applier]:
    """Returns the appliers of a run in the order of their phases: the user's, and the missing ones of the axes.

    Args:
        given: Appliers of the user.
        cp_method: Method of ContextParallel, unless the user gives that applier.
        sequence_parallel: Option of TensorParallel, unless the user gives that applier.

    Raises:
        DloError: Two appliers have one class, or an object is not an applier.
    """
    for applier in given:
        if not isinstance(applier, Applier):
            raise DloError(
                f"appliers must derive from dlo_framework.applier.Applier, got a {type(applier).__name__}; derive its"
                " class from Applier"
            )
    kinds = [type(applier) for applier in given]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        raise DloError(f"appliers must have different classes, got {twice.__name__} twice; leave one out")
    own = {
        TensorParallel: lambda: TensorParallel(sequence_parallel=sequence_parallel),
        ContextParallel: lambda: ContextParallel(method=cp_method),
        FullyShard: FullyShard,
    }
    missing = [make() for kind, make in own.items() if not any(isinstance(applier, kind) for applier in given)]
    return sorted([*given, *missing], key=lambda applier: applier.phase)
