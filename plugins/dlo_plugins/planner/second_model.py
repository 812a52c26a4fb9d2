"""Predicts what a run's second models add, such as a teacher: bytes on a rank, and seconds of their forwards.

A strategy places a second model as the run's own: cut by the same axes, and sharded by the same ranks. Its blocks are
spread evenly over a pipeline's ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlo_plugins.planner.layout import Layout, StateFormat
from dlo_plugins.planner.machine import Machine
from dlo_plugins.planner.model_profile import ModelProfile
from dlo_plugins.planner.stage_parameters import local_bytes
from dlo_plugins.planner.step_time import TimeModel
from dlo_plugins.planner.work import Part


@dataclass(frozen=True)
class SecondModel:
    """Second model of a run, which does not train.

    Attributes:
        profile: Profile of the model.
        dtype: Name of the dtype of its parameters; None for the run's.
        offload: Whether parameters are in the host's memory, and those of two blocks on the device.
    """

    profile: ModelProfile
    dtype: str | None = None
    offload: bool = False

    def allows(self, layout: Layout) -> bool:
        """Returns whether a layout's axes can cut the model."""
        mesh, profile = layout.mesh, self.profile
        return mesh.tp in profile.tp and mesh.pp <= profile.pp and (mesh.cp == 1 or profile.cp)


class SecondModels:
    """Second models of a run on one machine.

    Args:
        models: Second models.
        machine: Machine.
        state: Bytes of the run's tensors.
    """

    def __init__(self, models: Sequence[SecondModel], machine: Machine, state: StateFormat) -> None:
        self._models = [(model, TimeModel(model.profile, machine, _format(model, state))) for model in models]
        self._state = state

    def allows(self, layout: Layout) -> bool:
        """Returns whether a layout's axes can cut all of them."""
        return all(model.allows(layout) for model, _ in self._models)

    def seconds(self, layout: Layout) -> float:
        """Returns the seconds of their forwards in a step, on one rank."""
        return sum(self._forward(model, times, layout) for model, times in self._models)

    def stored_bytes(self, layout: Layout) -> float:
        """Returns the bytes that a rank keeps of them for the whole run."""
        return sum(self._stored(model, times, layout) for model, times in self._models)

    def working_bytes(self, layout: Layout) -> float:
        """Returns the bytes that the forward of one of them needs beyond what is kept."""
        return max((self._working(model, times, layout) for model, times in self._models), default=0.0)

    def _forward(self, model: SecondModel, times: TimeModel, layout: Layout) -> float:
        mesh, profile, found = layout.mesh, model.profile, 0.0
        for part in profile.parts:
            one = times.part_time(part, layout, "none")
            computing = one.forward + one.tensor[0] + one.context[0]
            found += computing
            if layout.stored_sharers(self._state) > 1:
                size = local_bytes(((part, "", 1),), mesh.tp, times.state.gathered)
                gathering = times.machine.collective_seconds(size, layout.sharers, mesh.tp)
                found += times.machine.exposed(gathering, computing)
        return found * (layout.micro_batches + mesh.pp - 1) / mesh.pp

    def _stored(self, model: SecondModel, times: TimeModel, layout: Layout) -> float:
        units = [local_bytes(((p, "", 1),), layout.mesh.tp, times.state.parameter) for p in model.profile.parts]
        if model.offload:
            return float(sum(sorted(units)[-2:]))
        return self._of_rank(units, layout) / layout.stored_sharers(self._state)

    def _of_rank(self, units: Sequence[float], layout: Layout) -> float:
        """Returns the sum over the parts of the rank of a pipeline that has most."""
        stem, *blocks, head = units
        if layout.mesh.pp == 1 or not blocks:
            return float(sum(units))
        return math.ceil(len(blocks) / layout.mesh.pp) * max(blocks) + max(stem, head)

    def _working(self, model: SecondModel, times: TimeModel, layout: Layout) -> float:
        share, profile = times.share(layout), model.profile
        parts: list[Part] = [*profile.blocks] or [profile.head]
        working = max(part.peaks.unsaved.on(share) + 2 * part.output.on(share) for part in parts)
        if layout.stored_sharers(self._state) > 1 and not model.offload:
            units = [local_bytes(((p, "", 1),), layout.mesh.tp, times.state.gathered) for p in profile.parts]
            working += self._of_rank(units, layout) if layout.zero < 3 else sum(sorted(units)[-2:])
        return float(working)


def _format(model: SecondModel, state: StateFormat) -> StateFormat:
    if model.dtype is None:
        return state
    size = {"float64": 8, "float32": 4}.get(model.dtype, 2)
    return replace(state, compute=model.dtype, parameter=size, gathered=size, autocasts=False)
