"""Compares what ranks have written to parameters in a step: each stores its own part, so all must write the same."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError, shown_names

#: Difference of the sums of two ranks' values, relative to the values' norm, up to which they count as the same.
_TOLERANCE = 1e-5
#: Number of parts of a tensor that are summed.
_PARTS = 4


class WrittenValues:
    """Sums of the values that a rank's full parameters have at the end of their use, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """Names of the parameters that have been added."""
        return list(self._sums)

    @torch.no_grad()
    def add(self, name: str, full: Tensor) -> None:
        """Adds a parameter, or replaces its sums.

        Args:
            name: Name of the parameter.
            full: Full tensor.
        """
        if full.is_floating_point() and full.numel():
            flat = full.detach().reshape(-1)
            parts = [part.sum(dtype=torch.float64) for part in flat.chunk(_PARTS)]
            parts += [torch.zeros_like(parts[0])] * (_PARTS - len(parts))
            self._sums[name] = torch.stack([*parts, torch.linalg.vector_norm(flat).double()])

    def check(self, ranks: Communicator) -> None:
        """Compares the sums with those of other ranks, and drops them; a collective call.

        Args:
            ranks: Communicator of the ranks that must have the same values.

        Raises:
            DloError: A parameter has other values on another rank.
        """
        names, sums = self.names, list(self._sums.values())
        self._sums.clear()
        if not names or ranks.size == 1:
            return
        own = torch.stack(sums)  # [parameters, parts + 1]
        highest, lowest = ranks.maximum(own.clone()), -ranks.maximum(-own)
        differs = ((highest - lowest) > _TOLERANCE * highest[:, -1:]).any(1)
        found = [name for name, one in zip(names, differs.tolist(), strict=True) if one]
        if found:
            raise DloError(
                "what a step writes to sharded parameters must be the same on all ranks, got other values on each for"
                f" {shown_names(found)}; compute it from what all ranks have, such as a mean by self.all_gather or"
                " torch.distributed.all_reduce, or write it before the run"
            )
