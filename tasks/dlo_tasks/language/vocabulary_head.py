"""Output projection of a language model, and functions of it that run inside one call of the projection.

FSDP, ZeRO's stage 3 and DeepSpeed gather a module's weights by hooks around its call. A call for each chunk of a loss
would gather them for each chunk, and ranks with different numbers of tokens would call differently often:
:func:`run_inside` runs all chunks inside one call, in which the weights are gathered.

Shapes: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dlo_framework.distributed.vocab_parallel import VocabularyShard, set_shard, shard_of
from dlo_framework.local_memory import inner_tensors
from dlo_framework.token_loss import PLAIN, TokenLoss
from dlo_tasks.language.batches import IGNORE_INDEX

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class VocabularyHead:
    """Head that turns hidden states into logits: `cap * tanh(scale * head(stage(hidden)) / cap)`.

    Attributes:
        module: Projection, `[N, D]` to `[N, V]`.
        scale: Factor of the projection's output (Cohere, Granite).
        softcap: Soft bound of the logits (Gemma 2: 30); None for no bound.
        stage: Part of the head before its projection (BERT), for the tokens with a target alone; None without one.
            See :func:`dlo_tasks.language.vocabulary_loss.enter_stage`.
    """

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    stage: Callable[[Tensor], Tensor] | None = None

    @property
    def shard(self) -> VocabularyShard | None:
        """This rank's shard of the vocabulary; None for the full vocabulary."""
        return shard_of(self.module)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of a few tokens over the full vocabulary, `[n, V]`, also where it is split.

        They are in float32, or in float64 if the model is.
        """
        return self._bent(self.module(hidden))

    def losses(self, hidden: Tensor, targets: Tensor, terms: TokenLoss = PLAIN, *, per_token: bool = False) -> Tensor:
        """Returns the sum of the losses of tokens that have a target, or `per_token` each, from all logits at once.

        Where the vocabulary is split, pass `hidden` through :meth:`VocabularyShard.enter` first; no rank computes all
        logits.
        """
        if self.shard is None:
            logits = self.logits(hidden)
            losses = F.cross_entropy(
                logits,
                targets,
                ignore_index=IGNORE_INDEX,
                reduction="none" if per_token else "sum",
                label_smoothing=terms.label_smoothing,
            )
            if terms.z_loss:
                squares = torch.logsumexp(logits, dim=1).square().masked_fill(targets == IGNORE_INDEX, 0)
                losses = losses + terms.z_loss * (squares if per_token else squares.sum())
            return losses
        losses = self.shard.cross_entropy(self.own_logits(hidden), targets, terms)
        losses = losses.masked_fill(targets == IGNORE_INDEX, 0)
        return losses if per_token else losses.sum()

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of a few tokens over this rank's shard of the vocabulary, `[n, v]`; see :meth:`logits`."""
        return self._bent(self.module(hidden, split=True))

    def _bent(self, logits: Tensor) -> Tensor:
        bent = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            bent = bent * self.scale
        return bent if self.softcap is None else self.softcap * torch.tanh(bent / self.softcap)

    @property
    def out_features(self) -> int | None:
        """Number of logits per token; None where the projection does not say it."""
        return getattr(self.module, "out_features", None)

    @property
    def is_gathered(self) -> bool:
        """Whether a strategy gathers the projection's weights when it is called."""
        parts = [self.module, *self.module.children()]
        hooked = any(part._forward_pre_hooks or part._forward_hooks for part in parts)
        return hooked or any(is_elsewhere(parameter) for parameter in self.module.parameters())

    @property
    def fuses(self) -> bool:
        """Whether the projection is a plain matrix product whose weight is available, or is during its call."""
        if self.is_gathered:
            return self.is_product and can_run_inside(self)
        return self.is_product and not is_quantised(self.module)

    @property
    def is_product(self) -> bool:
        """Whether the projection is a plain matrix product, without a LoRA adapter or a factor."""
        plain = type(self.module) is nn.Linear or (self.shard is not None and isinstance(self.module, nn.Linear))
        return plain and self.scale == 1.0


def is_quantised(module: Any) -> bool:
    """Returns whether a weight is a tensor of several others, such as torchao's, which only its layer computes with."""
    return bool(inner_tensors(module.weight))


def head_width(head: VocabularyHead) -> int:
    """Returns the number of logits per token; 2**18 for a head without `out_features`."""
    return head.out_features or 2**18


def can_run_inside(head: VocabularyHead) -> bool:
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


def run_inside(head: VocabularyHead, hidden: Tensor, function: Callable[[VocabularyHead, Tensor], _Result]) -> _Result:
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
        return function(replace(head, module=_Direct(module, forward, head.out_features)), states)

    module.__dict__["forward"] = inner
    try:
        result: _Result = module(hidden)
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own
    return result


class _Direct(nn.Module):
    """Projection that computes without its hooks; it has the parameters of another module.

    Args:
        module: Module with the weights.
        forward: Forward of that module, without hooks.
        out_features: Number of logits per token, if it is known.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], out_features: int | None) -> None:
        super().__init__()
        self._parameters = module._parameters
        self._forward, self.out_features = forward, out_features
        shard: Any = shard_of(module)
        if shard is not None:
            set_shard(self, shard)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the logits."""
        return self._forward(*args, **kwargs)
