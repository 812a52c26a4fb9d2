"""All-gathers of FSDP2 in float8: weights of layers with float8 products travel as one byte an element.

A weight has one scale, of its largest value over all ranks, which one all-reduce a batch finds for all weights. Each
rank rounds its shard, FSDP2 gathers bytes, and the gathered weight is the rounded one in the dtype in which parameters
are gathered. The product then rounds it again, with the same scale, to the same bytes. torchao (0.18) has the same
arithmetic in a subclass of the weight, whose products take the gathered bytes; here the weight stays a plain tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dlo_plugins.fsdp.step_state import own_groups

_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class Float8Gather:
    """Gathers of some weights in float8; begins by :meth:`refresh`.

    Args:
        module: Module that FSDP2 has sharded, with no parameter gathered.
        layers: Layers whose weights to gather in float8, with whether tensor parallelism slices the weight.
        over_shards: Function that takes the elementwise maximum over the ranks that shard a weight, in place.
        over_slices: Function that takes it over the ranks of tensor parallelism.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Iterable[tuple[nn.Module, bool]],
        over_shards: Callable[[Tensor], Tensor],
        over_slices: Callable[[Tensor], Tensor],
    ) -> None:
        self._over_shards, self._over_slices = over_shards, over_slices
        sliced = {id(layer): cut for layer, cut in layers}
        found = [(param, param._module_info) for param in sharded_params(module)]
        own = [(param, id(info.module)) for param, info in found if info.param_name == "weight"]
        self._params = [param for param, layer in own if layer in sliced]
        self._sliced = torch.tensor([sliced[layer] for _, layer in own if layer in sliced])
        forget_gathered(self._params)

    def __len__(self) -> int:
        return len(self._params)

    @torch.no_grad()
    def refresh(self) -> None:
        """Computes the scales of the current weights; all ranks call it before they use new ones."""
        from torchao.float8.config import e4m3_dtype
        from torchao.float8.float8_utils import amax_to_scale

        found = []
        for param in self._params:
            local = _local(param)
            largest = local.abs().amax().float() if local.numel() else local.new_zeros(()).float()
            found.append(largest.to(param.device, non_blocking=True))
        largest = self._over_shards(torch.stack(found))
        if self._sliced.any():
            largest = torch.where(self._sliced.to(largest.device), self._over_slices(largest.clone()), largest)
        for param, value in zip(self._params, largest.unbind(), strict=True):
            # The product finds the scale in the gathered weight, which is in this dtype.
            self._attach(param, amax_to_scale(value.to(_dtype(param)), e4m3_dtype), e4m3_dtype)

    def remove(self) -> None:
        """Makes FSDP2 gather the weights as before."""
        for param in self._params:
            local = _local(param)
            for name in (_BEFORE, _AFTER, "to"):
                local.__dict__.pop(name, None)
        forget_gathered(self._params)
        self._params = []

    def _attach(self, param: Any, scale: Tensor, float8: torch.dtype) -> None:
        from torchao.float8.float8_utils import to_fp8_saturated

        local = _local(param)

        def attach(shard: Tensor) -> Tensor:
            """Attaches FSDP2's extension to a shard, or to its copy on the device."""
            setattr(shard, _BEFORE, functools.partial(before, shard))
            setattr(shard, _AFTER, after)
            return shard

        def before(shard: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
            values = torch.Tensor.to(shard.detach(), _dtype(param))
            rounded = to_fp8_saturated(values.float() * scale, float8).view(torch.uint8)
            missing = param.padded_sharded_param_size[0] - len(rounded)
            if missing:
                rounded = torch.cat([rounded, rounded.new_zeros(missing, *rounded.shape[1:])])
            return (rounded,), None

        def after(outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
            (gathered,) = outputs
            rows = gathered[: param._orig_size[0]].view(float8)
            full = (rows.float() / scale).to(dtype)
            gathered.untyped_storage().resize_(0)  # FSDP2 allocates it again for the next gather.
            if out is None:
                return full, (full,)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):  # type: ignore[attr-defined]
                out.copy_(full)
            return None

        attach(local)
        if param.offload_to_cpu:
            # FSDP2 (torch 2.11 to 2.15) copies an offloaded shard by this method, and asks the copy for its extension.
            local.to = lambda *args, **kwargs: attach(torch.Tensor.to(local, *args, **kwargs))  # type: ignore[method-assign]


def sharded_params(module: nn.Module) -> Iterator[Any]:
    """Yields FSDP2's objects for the parameters that it shards; torch (2.11 to 2.15) shows them in its state alone."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in own_groups(part._get_fsdp_state()):
                yield from group.fsdp_params


def forget_gathered(params: Iterable[Any]) -> None:
    """Drops the gathered parameters that FSDP2 (torch 2.11 to 2.15) keeps for the next gather, of another dtype."""
    for param in params:
        param.__dict__.pop("_unsharded_param", None)
        param.all_gather_outputs, param._unsharded_inner_tensors = [], []
        if not hasattr(param, "_extensions_data"):
            from torch.distributed.fsdp._fully_shard._fsdp_param import ExtensionsData

            param._extensions_data = ExtensionsData()


def _dtype(param: Any) -> torch.dtype:
    found: torch.dtype = param.mp_policy.param_dtype or param.sharded_param.dtype
    return found


def _local(param: Any) -> Tensor:
    found: Tensor = param.sharded_param._local_tensor
    return found
