"""Runs chunks of a loss inside one call of a head's projection, in which a strategy has gathered its weights.

FSDP, ZeRO's stage 3 and DeepSpeed gather a module's weights by hooks around its call. A call for each chunk would
gather them for each chunk, and ranks with different numbers of tokens would call differently often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from dlo_framework.distributed.vocab_parallel import set_shard, shard_of

_Result = TypeVar("_Result")


def can_run_inside(head: Any) -> bool:
    """Returns whether a head's weights are gathered by its projection's own call, and not by those of modules in it."""
    return bool(head.is_gathered) and next(head.module.children(), None) is None


def run_inside(head: Any, hidden: Tensor, function: Callable[[Any, Tensor], _Result]) -> _Result:
    """Returns what a function returns that is called in place of the projection's forward, inside its hooks.

    Args:
        head: :class:`~dlo_tasks.llm.vocabulary_loss.VocabularyHead` whose weights are gathered when it is called.
        hidden: Hidden states, `[N, D]`, which hooks may cast.
        function: Function of the head, whose projection computes without hooks, and of the hidden states. Its result is
            a tensor or a tuple of tensors, on which hooks may act.
    """
    module = head.module
    forward, own = module.forward, module.__dict__.get("forward")

    def inner(states: Tensor) -> _Result:
        return function(replace(head, module=_Direct(module, forward, head.is_product)), states)

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
        is_product: Whether it is a plain product with its weight; see :attr:`VocabularyHead.is_product`.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], is_product: bool) -> None:
        super().__init__()
        self._parameters = module._parameters
        self._forward = forward
        self.is_product = is_product
        self.out_features = getattr(module, "out_features", None)
        shard: Any = shard_of(module)
        if shard is not None:
            set_shard(self, shard)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the logits."""
        return self._forward(*args, **kwargs)
