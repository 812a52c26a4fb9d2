"""Runs chunks of a loss inside one call of a head's projection, in which a strategy has gathered its weights.

FSDP, ZeRO's stage 3 and DeepSpeed gather a module's weights by hooks around its call. A call for each chunk would
gather them for each chunk, and ranks with different numbers of tokens would call differently often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dlo_framework.distributed.vocab_parallel import set_shard, shard_of

#: :class:`dlo_tasks.llm.vocabulary_loss.VocabularyHead`, which uses this module.
_Head = TypeVar("_Head", bound=Any)
_Result = TypeVar("_Result")


def can_run_inside(head: Any) -> bool:
    """Returns whether a strategy gathers a head's weights by its own call, and leaves that call's result unchanged.

    Those of a LoRA adapter are gathered by calls of its own. FSDP's `output_dtype` would round a sum of losses. A hook
    that is not a strategy's expects logits.
    """
    module = head.module
    if next(module.children(), None) is not None:
        return False
    if isinstance(module, FSDPModule):
        return module._get_fsdp_state()._mp_policy.output_dtype is None
    return any(is_elsewhere(parameter) or hasattr(parameter, "ds_id") for parameter in module.parameters())


def is_elsewhere(parameter: Tensor) -> bool:
    """Returns whether a rank holds a shard only: a DTensor, or a freed parameter that is gathered on use."""
    return isinstance(parameter, DTensor) or (parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0)


def run_inside(head: _Head, hidden: Tensor, function: Callable[[_Head, Tensor], _Result]) -> _Result:
    """Returns what a function returns that is called in place of the projection's forward, inside its hooks.

    Args:
        head: Head whose weights are gathered when it is called.
        hidden: Hidden states, `[N, D]`, which hooks may cast.
        function: Function of the head, whose projection computes without hooks, and of the hidden states. Its result is
            a tensor or a tuple of tensors, on which hooks may act.
    """
    module = head.module
    forward, own = module.forward, module.__dict__.get("forward")

    def inner(states: Tensor) -> _Result:
        return function(replace(head, module=_Direct(module, forward)), states)

    module.__dict__["forward"] = inner
    try:
        found: _Result = module(hidden)
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own
    return found


class _Direct(nn.Module):
    """Projection that computes without its hooks; it has the parameters of another module.

    Args:
        module: Module with the weights.
        forward: Forward of that module, without hooks.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self._parameters = module._parameters
        self._forward = forward
        self.out_features = getattr(module, "out_features", None)
        shard: Any = shard_of(module)
        if shard is not None:
            set_shard(self, shard)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the logits."""
        return self._forward(*args, **kwargs)
