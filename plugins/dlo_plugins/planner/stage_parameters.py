"""Numbers and bytes of the parameters of a pipeline's stage on one rank."""

from __future__ import annotations

from dlo_plugins.planner.layout import Layout
from dlo_plugins.planner.model_profile import ModelProfile
from dlo_plugins.planner.work import Part

#: Parts of a stage, each with its mode of recomputation and how often it occurs.
Stage = tuple[tuple[Part, str, int], ...]


def divides_end(part: Part, profile: ModelProfile) -> bool:
    """Returns whether `tp` divides the weights of a part that is the model's stem or head."""
    if part is not profile.stem and part is not profile.head:
        return False
    # A tied weight is among the stem's parameters.
    return bool(part.parameters.inside + (profile.tied.inside if part is profile.head else 0))


def local_count(stage: Stage, tp: int, *, trained: bool = False, ep: int = 1) -> float:
    """Returns the number of parameters of a stage on a rank of the axes `tp` and `ep`, before they are sharded.

    With its default `ep`, the number divided by all ranks that share the state is the rank's shard under any `ep`.
    """
    amounts = [(part.trained if trained else part.parameters, times) for part, _, times in stage]
    found = sum(times * (amount.inside / tp + amount.outside) for amount, times in amounts)
    return found if ep == 1 else found - expert_count(stage, tp, trained=trained) * (1 - 1 / ep)


def expert_count(stage: Stage, tp: int, *, trained: bool = False) -> float:
    """Returns the number of a stage's parameters that `ep` divides, on a rank of the axis `tp`."""
    amounts = [(part.trained_experts if trained else part.experts, times) for part, _, times in stage]
    return sum(times * (amount.inside / tp + amount.outside) for amount, times in amounts)


def cast_count(part: Part, tp: int, ep: int) -> float:
    """Returns the number of a part's parameters that autocast casts, on a rank of the axes `tp` and `ep`."""
    found = part.cast.inside / tp + part.cast.outside
    return found - expert_count(((part, "", 1),), tp) * (1 - 1 / ep) if found else 0.0


def local_bytes(stage: Stage, tp: int, element: int, ep: int = 1) -> float:
    """Returns the bytes of a stage's parameters on a rank of the axes `tp` and `ep`, before they are sharded.

    Args:
        stage: Parts of the stage.
        tp: Size of the axis.
        element: Bytes of a parameter in the run's dtype; others have a size of their own.
        ep: Size of the axis; see :func:`local_count`.
    """
    fixed = sum(times * (part.fixed.inside / tp + part.fixed.outside) for part, _, times in stage)
    return element * local_count(stage, tp, ep=ep) + fixed


def partial_count(stage: Stage, layout: Layout) -> float:
    """Returns the number of gradients of a rank that the ranks of `tp` sum once a step.

    They are of parameters that all these ranks have: in divided regions, and with a sharded sequence in all of a block,
    since a rank has some of the tokens.
    """
    if layout.mesh.tp == 1:
        return 0.0
    found = 0.0
    for part, _, times in stage:
        shares = layout.sequence_parallel and part.name not in ("stem", "head")
        found += times * (part.trained.outside if shares else part.partial)
    return found / (layout.sharers if layout.zero >= 2 else 1)
