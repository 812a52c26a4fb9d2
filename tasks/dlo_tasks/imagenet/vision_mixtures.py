"""Mixtures of experts in timm's models: V-MoE.

Scaling Vision with Sparse Mixture of Experts. Riquelme et al., 2021, arXiv 2106.05974. Departures: capacities are per
image, no noise is added to the routers' logits, and weights are divided by their sum unless `normalize` is false, so
that experts that start as copies of the MLP compute what it did.
"""

from __future__ import annotations

from timm.layers.mlp import Mlp, SwiGLU
from torch import nn

from dlo_framework.experts.layer import MixtureLayer
from dlo_framework.experts.mixture_options import MixtureOptions
from dlo_framework.experts.upcycling import DenseMLP, upcycle
from dlo_framework.plan import ParallelPlan


def add_mixtures(model: nn.Module, plan: ParallelPlan, options: MixtureOptions) -> None:
    """Replaces MLPs of a model's blocks by mixtures, in place.

    Args:
        model: Model of timm.
        plan: Plan of the model, which names its blocks.
        options: Options with `count`.

    Raises:
        DloError: If no block has an MLP of linear layers.
    """
    names = [name for block in plan.block_names(model) for name in _mlps(model, block)]
    upcycle(model, names, read_mlp, options)


def _mlps(model: nn.Module, block: str) -> list[str]:
    modules = model.get_submodule(block).named_modules()
    return [f"{block}.{name}" for name, module in modules if name.endswith("mlp") and read_mlp(module) is not None]


def read_mlp(mlp: nn.Module) -> DenseMLP | None:
    """Returns the linear layers of an MLP of timm (1.0); None for others, such as those with a norm or convolutions."""
    up: nn.Module
    gate: nn.Linear | None
    if isinstance(mlp, SwiGLU):
        up, gate = mlp.fc1_x, mlp.fc1_g
    elif isinstance(mlp, Mlp):
        up, gate = mlp.fc1, None
    else:
        return None
    down = mlp.fc2
    if not (isinstance(mlp.norm, nn.Identity) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        return None
    if (up.bias is None) != (down.bias is None):
        return None
    dropout = mlp.drop1.p, getattr(getattr(mlp, "drop2", None), "p", 0.0)
    return DenseMLP(up, down, mlp.act, gate, dropout)


def dense_mlps(model: nn.Module) -> list[nn.Module]:
    """Returns the MLPs of a model outside its mixtures."""
    inside = {id(part) for module in model.modules() if isinstance(module, MixtureLayer) for part in module.modules()}
    found = (module for name, module in model.named_modules() if name.endswith(".mlp"))
    return [module for module in found if id(module) not in inside]
