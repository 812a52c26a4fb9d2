"""Parameters that DeepSpeed's stage 3 has cut: each rank keeps a segment of each.

A cut parameter (DeepSpeed 0.15 to 0.19) has an empty tensor, ``ds_tensor`` with this rank's segment, padding included,
and ``ds_shape`` and ``ds_numel`` of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.checkpoint import FlatShard
from dlo_framework.checkpoint.deepspeed_layout import CutLayout
from dlo_framework.distributed.canonical import clean


def partitioned(parameter: Tensor) -> bool:
    """Returns whether stage 3 has cut a parameter."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: Any) -> torch.Size:
    """Returns a parameter's shape, also where it is cut."""
    return torch.Size(parameter.ds_shape) if partitioned(parameter) else parameter.shape


def held(parameter: Any) -> Tensor:
    """Returns the memory in which this rank keeps a parameter: its segment, padding included, where it is cut."""
    return parameter.ds_tensor if partitioned(parameter) else parameter


def segment(parameter: Any) -> FlatShard:
    """Returns what this rank holds of a cut parameter: the memory itself, without padding."""
    pieces = CutLayout((parameter.ds_numel,), dist.get_world_size()).pieces(dist.get_rank())
    kept = parameter.ds_tensor.data
    if not pieces:
        return FlatShard(kept[:0], whole_shape(parameter), 0)
    return FlatShard(kept[: pieces[0].length], whole_shape(parameter), pieces[0].start)


def segments(module: nn.Module) -> dict[str, FlatShard]:
    """Returns this rank's segments of all cut parameters by name; empty below stage 3."""
    return {clean(name): segment(p) for name, p in module.named_parameters() if partitioned(p)}


def partition(module: nn.Module, config: dict[str, Any]) -> None:
    """Cuts a module's parameters, one by one: no more than one is on the device as a whole.

    Left to itself, DeepSpeed moves the whole module to the device first.

    Args:
        module: its parameters become the first rank's.
        config: DeepSpeed's, complete.
    """
    import deepspeed

    deepspeed.zero.Init(module=module, config_dict_or_path=config)


@torch.no_grad()
def rejoin(module: nn.Module, attributes: Mapping[int, dict[str, Any]]) -> None:
    """Makes cut parameters whole again, one by one, on the CPU; called on all ranks.

    DeepSpeed (0.15 to 0.19) has no way back from ``zero.Init``: what it has put on parameters and modules is taken
    off.

    Args:
        module: its hooks are gone.
        attributes: what each parameter had before it was cut, by id.
    """
    for parameter in module.parameters():
        gathered: Any = parameter
        gathered.all_gather([parameter])
        parameter.data = parameter.data.to("cpu", copy=True)
        vars(parameter).clear()
        vars(parameter).update(attributes[id(parameter)])
    for part in module.modules():
        if "_original_parameters" in vars(part):
            part._parameters = vars(part).pop("_original_parameters")
