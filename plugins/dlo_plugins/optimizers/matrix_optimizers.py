"""SOAP, Shampoo and NorMuon of the package pytorch_optimizer (4.1), which need full matrices.

- SOAP: Improving and Stabilizing Shampoo using Adam. Vyas et al., 2024, arXiv 2409.11321.
- Shampoo: Preconditioned Stochastic Tensor Optimization. Gupta, Koren, Singer, 2018, arXiv 1802.09568.
- NorMuon: Making Muon more efficient and scalable. Li et al., 2025, arXiv 2510.05491.

A strategy steps each full tensor on one rank. The classes here refuse unknown arguments, which the package ignores, and
NorMuon takes timm's flag ``use_fallback`` for parameters that AdamW trains; vectors are among them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from dlo_framework.errors import DloError
from dlo_framework.optimizers import FullMatrices

try:
    import pytorch_optimizer
except ImportError as missing:
    raise DloError(
        f"soap, shampoo and normuon must have pytorch_optimizer, got {missing}; pip install 'dlo_framework[optimizers]'"
    ) from missing


def _check_arguments(base: type, options: dict[str, Any]) -> None:
    """Checks arguments against a constructor that ignores unknown ones.

    Raises:
        TypeError: On an unknown argument, as a constructor without ``**kwargs`` does.
    """
    known = set(inspect.signature(base).parameters) - {"params", "kwargs"}
    for name in options:
        if name not in known:
            raise TypeError(f"{base.__name__} has no argument '{name}', but {', '.join(sorted(known))}")


class SOAP(FullMatrices, pytorch_optimizer.SOAP):
    """Adam in the eigenbasis of Shampoo's preconditioners; the first step only initialises them.

    Args:
        params: Parameters, or parameter groups.
        **options: Arguments of pytorch_optimizer's SOAP.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        _check_arguments(pytorch_optimizer.SOAP, options)
        super().__init__(params, **options)

    def step(self, closure: Any = None) -> Any:
        """Takes a step.

        The eigenbases become row-major: QR returns columns, in another order of memory than a loaded checkpoint, from
        which products would round in another way.
        """
        loss = super().step(closure)
        for state in self.state.values():
            if state.get("Q") is not None:
                state["Q"] = [one.contiguous() if torch.is_tensor(one) else one for one in state["Q"]]
        return loss


class Shampoo(FullMatrices, pytorch_optimizer.Shampoo):
    """Gradients that are multiplied by inverse roots of their second moment, one matrix a dim.

    Args:
        params: Parameters, or parameter groups.
        **options: Arguments of pytorch_optimizer's Shampoo.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        _check_arguments(pytorch_optimizer.Shampoo, options)
        super().__init__(params, **options)


class NorMuon(FullMatrices, pytorch_optimizer.NorMuon):
    """Muon whose orthogonal update is normalised row by row.

    Matrices are stepped one by one: batches would depend on which tensors a rank owns, and so would the last bits.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate, of the AdamW groups too.
        weight_decay: Weight decay, of the AdamW groups too.
        **options: Arguments of pytorch_optimizer's NorMuon.
    """

    def __init__(self, params: Any, lr: float = 2e-2, weight_decay: float = 0.0, **options: Any) -> None:
        _check_arguments(pytorch_optimizer.NorMuon, options)
        groups: list[dict[str, Any]] = [dict(one) if isinstance(one, dict) else {"params": [one]} for one in params]
        for group in groups:
            group["params"] = list(group["params"])
            matrices = all(parameter.ndim >= 2 for parameter in group["params"])
            group.setdefault("use_muon", matrices and not group.pop("use_fallback", False))
        rates: dict[str, Any] = {"lr": lr, "adamw_lr": lr, "weight_decay": weight_decay, "adamw_wd": weight_decay}
        super().__init__(groups, **{"foreach": False, **rates, **options})
