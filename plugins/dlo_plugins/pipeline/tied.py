"""Tied weights, such as an embedding and the output projection, in stages of different ranks.

Each of these ranks holds a copy, computes the gradient of its own use, and receives the sum of all gradients. The
copies start equal, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.local_memory import local_tensor
from dlo_plugins.pipeline.actions import Placement
from dlo_plugins.pipeline.model_stages import Stages
from dlo_plugins.pipeline.transport import Transport


@dataclass(frozen=True)
class TiedGroup:
    """Parameter that several ranks hold.

    Attributes:
        names: Names of the parameter in the model.
        ranks: Ranks of the pipeline that hold it, in ascending order.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]

    def pairs(self) -> list[tuple[int, int]]:
        """Returns the pairs of ranks that exchange gradients: the first rank and each of the others."""
        return [(self.ranks[0], other) for other in self.ranks[1:]]


def find_tied_groups(model: nn.Module, stages: Stages, placement: Placement) -> list[TiedGroup]:
    """Returns the parameters that stages of several ranks use."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for group in names.values():
        ranks = sorted({placement.rank_of(stage) for stage in stages.stages_of(group[0])})
        if len(ranks) > 1:
            found.append(TiedGroup(tuple(group), tuple(ranks)))
    return found


class TiedWeights:
    """Sums the gradients of tied weights over the ranks that hold them.

    Args:
        model: Model that has been cut.
        groups: Tied parameters, the same on all ranks.
        transport: Transport between the ranks.
    """

    def __init__(self, model: nn.Module, groups: Sequence[TiedGroup], transport: Transport) -> None:
        self._model, self._transport, self._groups = model, transport, groups
        self._held = [tied for tied in groups if transport.rank in tied.ranks]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums the parameters' `.grad` over all uses; call it once a step, when gradients are complete."""
        for tied in self._held:
            parameter = self._model.get_parameter(tied.names[0])
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            self._sum(tied, parameter.grad)

    @torch.no_grad()
    def sum_tensors(self, gradients: Mapping[str, Tensor]) -> None:
        """Sums gradients that are not in the parameters' `.grad`, in place.

        Args:
            gradients: Gradients by the first of a parameter's names. For each tied weight, either all ranks that hold
                it have a gradient, or none of them.
        """
        for tied in self._held:
            if tied.names[0] in gradients:
                self._sum(tied, gradients[tied.names[0]])

    def named_on_any_rank(self, names: Collection[str]) -> set[str]:
        """Returns the tied weights of this rank that at least one rank names; all ranks of the pipeline call it.

        Args:
            names: Names of this rank's parameters, the first name of each.
        """
        if not self._groups:
            return set()
        named = [tied.names[0] in names for tied in self._groups]
        flags = torch.tensor(named, dtype=torch.uint8, device=self._transport.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._transport.group)
        found = {tied.names[0] for tied, flag in zip(self._groups, flags.tolist(), strict=True) if flag}
        return found & {tied.names[0] for tied in self._held}

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Returns the ranks of the pipeline that hold a tied weight, by its first name; none for another parameter."""
        return next((tied.ranks for tied in self._groups if tied.names[0] == name), ())

    def _sum(self, tied: TiedGroup, tensor: Tensor) -> None:
        gradient = local_tensor(
            tensor
        )  # FSDP2's shards of a tied weight have the same bounds on all ranks that hold it.
        first = tied.ranks[0]
        if self._transport.rank == first:
            for other in tied.ranks[1:]:
                gradient += self._receive(other, torch.empty_like(gradient))
        else:
            self._send(first, gradient)
        self._from_first(tied, gradient)

    def _from_first(self, tied: TiedGroup, tensor: Tensor) -> None:
        if self._transport.rank == tied.ranks[0]:
            for other in tied.ranks[1:]:
                self._send(other, tensor)
        else:
            tensor.copy_(self._receive(tied.ranks[0], torch.empty_like(tensor)))

    def _send(self, peer: int, tensor: Tensor) -> None:
        link = self._transport.link(peer, incoming=False)
        link.wait(link.send(tensor.contiguous()))

    def _receive(self, peer: int, into: Tensor) -> Tensor:
        link = self._transport.link(peer, incoming=True)
        link.wait(link.receive(into))
        return into
