"""The appliers of a run: those a user gives, those the mesh's axes ask for, in the order of their phases."""

from __future__ import annotations

from typing import Literal

from dlo_framework.applier import Applier
from dlo_framework.errors import DloError
from dlo_plugins.appliers.context_parallel import ContextParallel
from dlo_plugins.appliers.fully_shard import FullyShard
from dlo_plugins.appliers.tensor_parallel import TensorParallel


def in_order(given: list[Applier], cp_method: Literal["ring", "ulysses"], sequence_parallel: bool) -> list[Applier]:
    """Returns the appliers of a run by phase: those given, and for the axes those that are missing.

    Args:
        given: by the user.
        cp_method: of ContextParallel, unless that is given.
        sequence_parallel: of TensorParallel, unless that is given.

    Raises:
        DloError: for two of one class, or what is no applier.
    """
    for applier in given:
        if not isinstance(applier, Applier):
            raise DloError(f"appliers are dlo_framework.applier.Applier, but one is a {type(applier).__name__}")
    kinds = [type(applier) for applier in given]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        raise DloError(f"appliers: {twice.__name__} stands there twice; leave one out")
    own = {
        TensorParallel: lambda: TensorParallel(sequence_parallel=sequence_parallel),
        ContextParallel: lambda: ContextParallel(method=cp_method),
        FullyShard: FullyShard,
    }
    missing = [make() for kind, make in own.items() if not any(isinstance(applier, kind) for applier in given)]
    return sorted([*given, *missing], key=lambda applier: applier.phase)
