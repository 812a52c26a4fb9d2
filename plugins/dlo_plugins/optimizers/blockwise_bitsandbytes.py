"""Optimizers of bitsandbytes (0.50) with a block-wise state of 8 bits, on CPUs and on CUDA.

8-bit Optimizers via Block-wise Quantization. Dettmers, Lewis, Shleifer, Zettlemoyer, 2021, arXiv 2110.02861.

timm names some of them too, and refuses them without CUDA; these names replace timm's. Checkpoints hold codes
(``state1``), scales (``absmax1``) and the codes' values (``qmap1``) under keys of their own, which bitsandbytes nests.
``LAMB8bit`` and ``LARS8bit`` are left out: their block-wise step (0.50) leaves the trust ratio out. Paged optimizers
are left out too: they need CUDA's unified memory, which no checkpoint can describe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_framework.errors import DloError
from dlo_framework.optimizers import FlatState

try:
    from bitsandbytes import optim as bnb_optim
except ImportError as missing:
    raise DloError(
        f"optimizers of bitsandbytes must have the package, got {missing}; pip install 'dlo_framework[optimizers]'"
    ) from missing


class _Flat(FlatState):
    """Base in front of one of bitsandbytes' classes: its state has no nested mapping."""

    def flatten(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a parameter's state with the quantised tensors under keys of their own."""
        flat: dict[str, Any] = {}
        for key, value in state.items():
            flat |= value if isinstance(value, dict) else {key: value}
        return flat

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a parameter's state; bitsandbytes loads the flat form too."""
        return dict(state)


class BnbAdam8bit(_Flat, bnb_optim.Adam8bit):
    """Adam with moments of 8 bits."""


class BnbAdamW8bit(_Flat, bnb_optim.AdamW8bit):
    """AdamW with moments of 8 bits."""


class BnbLion8bit(_Flat, bnb_optim.Lion8bit):
    """Lion with a momentum of 8 bits (arXiv 2302.06675)."""


class BnbAdEMAMix8bit(_Flat, bnb_optim.AdEMAMix8bit):
    """AdEMAMix with moments of 8 bits (arXiv 2409.03137)."""


class BnbSGD8bit(_Flat, bnb_optim.SGD8bit):
    """SGD with a momentum of 8 bits; ``momentum`` is 0.9 unless it is given."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, **options: Any) -> None:
        super().__init__(params, lr, momentum=momentum, **options)


class BnbRMSprop8bit(_Flat, bnb_optim.RMSprop8bit):
    """RMSprop with a second moment of 8 bits."""


class BnbAdagrad8bit(_Flat, bnb_optim.Adagrad8bit):
    """Adagrad with a sum of squares of 8 bits."""
