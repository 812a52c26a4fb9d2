"""Parameters that DeepSpeed's stage 3 has partitioned: each rank holds a segment of each.

A partitioned parameter (DeepSpeed 0.15 to 0.19) has an empty tensor, ``ds_tensor`` with this rank's segment and its
padding, and ``ds_shape`` and ``ds_numel`` of the full tensor.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.distributed.failure import is_lost_connection
from dlo_framework.errors import DloError
from dlo_framework.shards import FlatShard
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.deepspeed.deepspeed_layout import Stage3Layout
from dlo_plugins.sharding.user_code import OutsideUse, calling_module

#: Packages that use partitioned parameters as DeepSpeed wants it.
_LIBRARIES = ("deepspeed.", "dlo_framework.", "dlo_plugins.", "lightning.")


def is_partitioned(parameter: Tensor) -> bool:
    """Returns whether stage 3 has partitioned a parameter."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Any) -> torch.Size:
    """Returns the full shape of a parameter, partitioned or not."""
    return torch.Size(parameter.ds_shape) if is_partitioned(parameter) else parameter.shape


def local_partition(parameter: Any) -> Tensor:
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


@contextlib.contextmanager
def refuse_empty(module: nn.Module, where: str, *, allows_data: bool = False) -> Iterator[None]:
    """Refuses uses of partitioned parameters inside the block, which DeepSpeed gathers for their own modules alone.

    Args:
        module: Module with the parameters.
        where: Name of the code in the block, for the message.
        allows_data: Whether the ``data`` of gathered parameters may be read, and so be written unseen.

    Raises:
        DloError: The user's code uses a parameter that is not gathered, or the ``data`` of one.
    """
    known: dict[int, tuple[str, Any]] = {id(p): (plain_name(name), p) for name, p in module.named_parameters()}

    def on_use(parameter: int, by_data: bool) -> None:
        name, tensor = known[parameter]
        is_gathered = not is_partitioned(tensor) or tensor.ds_status.name == "AVAILABLE"
        if not (is_gathered and (allows_data or not by_data)) and not calling_module().startswith(_LIBRARIES):
            raise DloError(
                "weights under DeepSpeed's stage 3 must be used in their own module's forward, got a use of"
                f" {name}{'.data' * by_data} in {where}; use strategy zero3, which gathers them there, or a lower stage"
            )

    with OutsideUse(set(known), on_use):
        yield


@contextlib.contextmanager
def explain_step() -> Iterator[None]:
    """Explains an error of a step that DeepSpeed or a backward raises, as where weights are used after their release.

    Raises:
        DloError: Such an error was raised.
    """
    try:
        yield
    except (DloError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frames = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
        raiser = next((name for name in frames if not name.startswith(("torch.", "dlo_plugins."))), "")
        if is_lost_connection(error) or not (raiser.startswith("deepspeed.") or frames[0] == "torch.autograd.graph"):
            raise
        raise DloError(
            "a step under DeepSpeed's stage 3 must use weights in their own module's forward, and take one backward of"
            f" it, got {type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}; use strategy zero3, or"
            " ddp where the error may be the model's own"
        ) from error
