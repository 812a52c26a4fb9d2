"""Parameters that DeepSpeed's stage 3 has partitioned: each rank holds a segment of each.

A partitioned parameter (DeepSpeed 0.15 to 0.19) has an empty tensor, ``ds_tensor`` with this rank's segment and its
padding, and ``ds_shape`` and ``ds_numel`` of the full tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.distributed.checkpointing import plain_name
from dlo_framework.shards import FlatShard
from dlo_plugins.deepspeed.deepspeed_layout import Stage3Layout


def is_partitioned(parameter: Tensor) -> bool:
    """Returns whether stage 3 has partitioned a parameter."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Any) -> torch.Size:
    """Returns the full shape of a parameter, partitioned or not."""
    return torch.Size(parameter.ds_shape) if is_partitioned(parameter) else parameter.shape


def local_tensor(parameter: Any) -> Tensor:
    """Returns the local tensor of a parameter: this rank's segment with padding if it is partitioned."""
    return parameter.ds_tensor if is_partitioned(parameter) else parameter


def segment(parameter: Any) -> FlatShard:
    """Returns this rank's segment of a partitioned parameter, without padding; it shares DeepSpeed's memory."""
    pieces = Stage3Layout((parameter.ds_numel,), dist.get_world_size()).slices(dist.get_rank())
    kept = parameter.ds_tensor.data
    if not pieces:
        return FlatShard(kept[:0], full_shape(parameter), 0)
    return FlatShard(kept[: pieces[0].length], full_shape(parameter), pieces[0].start)


def segments(module: nn.Module) -> dict[str, FlatShard]:
    """Returns this rank's segments of all partitioned parameters by name; empty below stage 3."""
    return {plain_name(name): segment(p) for name, p in module.named_parameters() if is_partitioned(p)}


def partition_params(module: nn.Module, config: dict[str, Any]) -> None:
    """Partitions a module's parameters one by one: the device never holds more than one full tensor.

    By default DeepSpeed moves the whole module to the device first.

    Args:
        module: Module whose parameters become those of the first rank.
        config: Complete DeepSpeed configuration.
    """
    import deepspeed

    deepspeed.zero.Init(module=module, config_dict_or_path=config)


@torch.no_grad()
def gather_params(module: nn.Module, attributes: Mapping[int, dict[str, Any]]) -> None:
    """Gathers partitioned parameters one by one, on the CPU; called on all ranks.

    DeepSpeed (0.15 to 0.19) has no inverse of ``zero.Init``: this function removes what it has set on parameters and
    modules.

    Args:
        module: Module whose hooks have been removed.
        attributes: Attributes of each parameter before it was partitioned, by id.
    """
    for parameter in module.parameters():
        gathered: Any = parameter
        gathered.all_gather([parameter])
        parameter.data = parameter.data.to("cpu", copy=True)
        vars(parameter).clear()
        vars(parameter).update(attributes[id(parameter)])
    for child in module.modules():
        if "_original_parameters" in vars(child):
            child._parameters = vars(child).pop("_original_parameters")
