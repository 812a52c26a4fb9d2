"""Text generation of a model whose blocks are stages of a pipeline: all ranks write the same tokens.

transformers' `generate` runs on every rank of the pipeline. Each of its forwards runs through the stages, and the last
stage's logits are broadcast, so all ranks choose the same next token and end together. Each stage keeps the keys and
values of its own blocks. A token passes the stages one after another, so one stage computes at a time: rows of a batch
share that latency.

Models with a state other than keys and values (Mamba) write without a cache, and compute all tokens again for each one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Names of the cache in transformers' forwards: that of 5.24, and that of earlier versions.
_CACHES = ("cache", "past_key_values")


def keeps_keys_and_values(model: PreTrainedModel) -> bool:
    """Returns whether the state of a model's generation is keys and values only, of which each stage keeps its own.

    A reach into transformers (5.24): whether `generate` makes a `DynamicCache` is a private method, and the kinds of
    its layers are those of the config.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    own: Any = model
    if not own._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


@contextlib.contextmanager
def staged_forward(model: PreTrainedModel, pipelined: Any) -> Iterator[None]:
    """Makes a model's forward run through the pipeline's stages inside the context, with its logits on all ranks.

    `generate` has no argument for another forward: this replaces the method of this one model, and restores it.

    Args:
        model: Model of which this rank holds some stages.
        pipelined: Pipelined task of the strategy; None without a pipeline, where nothing changes.
    """
    if pipelined is None:
        yield
        return
    from transformers.modeling_outputs import CausalLMOutputWithPast

    own = model.forward
    names = {field.name for field in fields(CausalLMOutputWithPast)}
    caches: list[Any] = []  # One for each stage of this rank: a stage's masks are as long as its own cache.

    @functools.wraps(own)
    def forward(**arguments: Any) -> Any:
        # The mask of padding grows with each token, and no stage sends it.
        sent = {n: v for n, v in arguments.items() if isinstance(v, Tensor) and n != "attention_mask"}
        kept = {name: value for name, value in arguments.items() if name not in sent}
        name = next((name for name in _CACHES if kept.get(name) is not None), None)
        if name is not None and not caches:
            caches.append(kept[name])
            caches.extend(copy.deepcopy(kept[name]) for _ in range(pipelined.stages_per_rank - 1))
        stages = iter(caches)

        def logits(part: dict[str, Tensor]) -> Tensor:  # Called for each stage of this rank, in their order.
            cache = {} if name is None else {name: next(stages)}
            found: Tensor = own(**{**kept, **cache}, **part).logits
            return found

        found = pipelined.run_on_all_ranks(sent, logits)
        if name is None:
            return CausalLMOutputWithPast(logits=found)
        for cache in caches:
            _count_tokens(cache, found)
        return CausalLMOutputWithPast(logits=found, **{name if name in names else _CACHES[1]: caches[0]})

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


def _count_tokens(cache: Any, logits: Tensor) -> None:
    """Makes the cache's layers of other stages as long as this stage's, by zeros of one row and one feature.

    Every stage computes masks and positions from the cache's first layers, which may be another stage's.
    """
    lengths = [int(layer.get_seq_length()) for layer in cache.layers]
    for number, length in enumerate(lengths):
        missing = max(lengths) - length
        if missing:
            empty = torch.zeros(1, 1, missing, 1, dtype=logits.dtype, device=logits.device)
            cache.update(empty, empty, number)
