"""Random numbers that differ between the ranks of a layer, for dropout on sharded activations.

All ranks of the axis draw the same random numbers, so that dropout on replicated activations is equal on all of them.
On sharded activations it must differ. A seed is drawn from the common numbers and combined with the rank; afterwards
the common state is as if only the seed had been drawn. So everything follows from the common state: a resume, and a
recomputation that restores this state, draw the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: Classes of dropout modules.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: Attributes with a probability of dropout, for modules without a dropout module.
_PROBABILITIES = ("attention_dropout", "attn_dropout", "dropout", "dropout_p")
_SPREAD = 0x9E3779B97F4A7C15  # An odd number with well-mixed bits, so that ranks' seeds are far apart.


class LocalRandom:
    """Switches the default generators of the CPU and the accelerator to this rank's numbers, and back.

    Args:
        rank: This rank's number among those that share the common numbers.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: list[Any] | None = None
        self._owner: Any = None

    def enter(self, owner: Any, device: torch.device) -> None:
        """Switches to this rank's own numbers, unless they are on already; only the owner switches back."""
        if self._common is None and device.type != "meta":
            self._switch(owner, device)

    def leave(self, owner: Any) -> None:
        """Switches back to the common numbers, if the owner has switched."""
        if self._common is not None and self._owner is owner:
            self._switch_back()

    @torch.compiler.disable
    def _switch(self, owner: Any, device: torch.device) -> None:
        drawn = int(torch.randint(2**63 - 1, (), device="cpu"))
        seed = (drawn + (self._rank + 1) * _SPREAD) % 2**63
        self._owner, self._common = owner, [torch.get_rng_state(), device, None]
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._common[2] = module.get_rng_state(device)
            module.manual_seed(seed)

    @torch.compiler.disable
    def _switch_back(self) -> None:
        assert self._common is not None
        (cpu, device, state), self._owner, self._common = self._common, None, None
        torch.set_rng_state(cpu)
        if state is not None:
            torch.get_device_module(device).set_rng_state(state, device)


class Dropouts:
    """Dropouts of a module and of all modules inside it.

    Args:
        module: Module to search.
    """

    def __init__(self, module: nn.Module) -> None:
        self._rates: list[tuple[nn.Module, str]] = []
        for part in module.modules():
            keys = [key for key in _PROBABILITIES if isinstance(getattr(part, key, None), float)]
            self._rates += [(part, key) for key in (["p", *keys] if isinstance(part, DROPOUTS) else keys)]

    @property
    def active(self) -> bool:
        """Whether any dropout draws random numbers now."""
        return any(part.training and getattr(part, key) > 0 for part, key in self._rates)
