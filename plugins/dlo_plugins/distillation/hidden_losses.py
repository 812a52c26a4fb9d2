"""Distances between the activations of a student's and a teacher's layers.

* Hidden states: FitNets: Hints for Thin Deep Nets, Romero et al., 2014, arXiv 1412.6550: the mean squared difference
  between the teacher's states and a trained projection of the student's. DistilBERT, Sanh et al., 2019, arXiv
  1910.01108: one minus their cosine. Departure: FitNets' regressor is a convolution; here it is linear, over features.
* Attention transfer: Paying More Attention to Attention, Zagoruyko & Komodakis, 2017, arXiv 1612.03928: a map is
  the sum over features of its squared activations, at each position, divided by the map's norm. Departure: for a
  transformer, positions are tokens.

Shapes: B samples, N positions (pixels or tokens), D features of the student, E of the teacher.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_framework.distributed.collectives import sum_over_ranks

#: Distance of hidden states.
HiddenLossName = Literal["mse", "cosine"]


def as_sequence(activation: Tensor) -> Tensor:
    """Returns an activation `[B, N, D]` from `[B, D, H, W]`, `[B, N, D]` or `[B, D]`."""
    if activation.ndim == 4:
        return activation.flatten(2).transpose(1, 2)
    return activation if activation.ndim == 3 else activation[:, None]


def pool_to_same_grid(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Averages the larger of two grids, `[B, D, H, W]`, to the size of the smaller one, in each direction."""
    if student.ndim != 4 or student.shape[2:] == teacher.shape[2:]:
        return student, teacher
    size = (min(student.shape[2], teacher.shape[2]), min(student.shape[3], teacher.shape[3]))
    return F.adaptive_avg_pool2d(student, size), F.adaptive_avg_pool2d(teacher, size)


def hidden_distances(projected: Tensor, teacher: Tensor, kind: HiddenLossName) -> Tensor:
    """Returns the distance at each position, `[B, N]` in float32 at least.

    Args:
        projected: Student's states, projected to the teacher's width, `[B, N, E]`.
        teacher: Teacher's states, `[B, N, E]`.
        kind: `mse`, the mean over features of the squared difference; `cosine`, one minus the cosine.
    """
    dtype = torch.promote_types(projected.dtype, torch.float32)
    ours, theirs = projected.to(dtype), teacher.to(dtype)
    if kind == "mse":
        return (ours - theirs).square().mean(dim=-1)
    return 1 - F.cosine_similarity(ours, theirs, dim=-1)


def attention_map(activation: Tensor, counted: Tensor | None = None, group: Any = None) -> Tensor:
    """Returns the map of an activation, `[B, N]` in float32 at least, of norm 1 over all positions.

    Args:
        activation: Activation, `[B, D, H, W]` or `[B, N, D]`.
        counted: Positions that belong to the map, 1 or 0, `[B, N]`; None for all.
        group: Process group of the ranks that share the positions; None for one rank.
    """
    states = as_sequence(activation)
    values = states.to(torch.promote_types(states.dtype, torch.float32)).square().mean(dim=-1)
    if counted is not None:
        values = values * counted
    if group is None:
        return F.normalize(values, dim=1)
    squares = sum_over_ranks(values.square().sum(dim=1, keepdim=True), group)
    return values / (squares + torch.finfo(values.dtype).tiny).sqrt().clamp_min(1e-12)


def attention_distances(student: Tensor, teacher: Tensor, counted: Tensor | None = None, group: Any = None) -> Tensor:
    """Returns the norm of the difference of both maps, `[B]`.

    Args:
        student: Activation of the student, `[B, D, H, W]` or `[B, N, D]`.
        teacher: Activation of the teacher, with as many positions.
        counted: Positions that belong to the maps, 1 or 0, `[B, N]`; None for all.
        group: Process group of the ranks that share the positions; None for one rank.
    """
    apart = attention_map(student, counted, group) - attention_map(teacher, counted, group)
    squares = sum_over_ranks(apart.square().sum(dim=1), group)
    return (squares + torch.finfo(apart.dtype).tiny).sqrt()
