"""Interface to transformers' models: they compute their attention over a shared sequence.

Written for transformers 5 (tried with 5.23): `AttentionInterface.register`, `PreTrainedModel.set_attn_implementation`,
and no mask for an implementation without a registered one (`masking_utils._preprocess_mask_arguments`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from dlo_framework.attention.attention_mask import find_heads, find_mask
from dlo_framework.errors import DloError
from dlo_plugins.context.fused import Score
from dlo_plugins.context.shared_sequence import SharedSequence

#: Name of this implementation in transformers, which searches names for "sdpa" and "flash": it contains neither.
IMPLEMENTATION = "dlo_shared_sequence"
#: Attribute in which an attention module keeps its shared sequence.
_SEQUENCE = "_dlo_sequence"
#: Kinds of layers (`config.layer_types`) that mix positions only by the attention of this package.
_LAYERS = {"full_attention", "sliding_attention", "attention"}


def share_attention(module: nn.Module, attention: Sequence[str], sequence: SharedSequence) -> None:
    """Makes a model's attention modules compute over a shared sequence.

    Args:
        module: Model of transformers, or one with such a model inside.
        attention: Names of its attention modules.
        sequence: Shared sequence of the attention modules.

    Raises:
        DloError: If attention cannot be replaced; see :func:`check_model`.
    """
    check_model(module, attention)
    for model in outermost(module):
        model.set_attn_implementation(IMPLEMENTATION)
    for name in attention:
        part = module.get_submodule(name)
        part.__dict__[_SEQUENCE] = sequence
        mask = find_mask(part)
        if mask is not None:
            sequence.set_mask(mask, find_heads(part))


def check_model(module: nn.Module, attention: Sequence[str]) -> None:
    """Checks that a model mixes positions only by attention, and that its attention can be replaced.

    Raises:
        DloError: If the model is not a causal language model of transformers, its attention cannot be replaced, or
            it mixes positions in other ways, such as convolutions and state-space layers.
    """
    from transformers import AttentionInterface

    models = outermost(module)
    if not models:
        raise DloError(
            "the model must be a causal language model of transformers for context parallelism, got"
            f" {type(module).__name__}; set cp=1, and use tp, pp or dp instead"
        )
    for model in models:
        _check_family(model)
    if not attention:
        raise DloError(
            "a plan must have the names of the attention modules for context parallelism, got none from"
            f" {type(module).__name__}; set ParallelPlan(attention=(...))"
        )
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    before = [model.config._attn_implementation for model in models]
    try:
        for model in models:
            model.set_attn_implementation(IMPLEMENTATION)
        for name in attention:
            _check_attention(module, name)
    finally:
        for model, implementation in zip(models, before, strict=True):
            model.set_attn_implementation(implementation)


def outermost(module: nn.Module) -> list[Any]:
    """Returns the outermost models of transformers in a module."""
    from transformers import PreTrainedModel

    found: list[tuple[str, Any]] = []
    for name, part in module.named_modules():
        inside = any(not outer or name.startswith(outer + ".") for outer, _ in found)
        if isinstance(part, PreTrainedModel) and not inside:
            found.append((name, part))
    return [model for _, model in found]


@contextlib.contextmanager
def own_attention(module: nn.Module, implementation: str) -> Iterator[None]:
    """Switches a model to another attention implementation inside the block, without a shared sequence."""
    models = outermost(module)
    try:
        for model in models:
            model.set_attn_implementation(implementation)
        yield
    finally:
        for model in models:
            model.set_attn_implementation(IMPLEMENTATION)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the signature of transformers' attention functions.

    Args:
        module: Attention module.
        query: Queries [B, H, S, D] of this rank's positions.
        key: Keys [B, K, S, D] of this rank's positions.
        value: Values [B, K, S, E] of this rank's positions.
        attention_mask: None, as the batch has the documents and the padding.
        dropout: Rate of weights that are dropped.
        scaling: Factor on scores; the inverse square root of D by default.
        sliding_window: Number of tokens that a token sees, including itself.
        softcap: Soft bound of the scores.
        s_aux: Score of each head's attention sink, [H]; None without sinks.
        **others: Further arguments of some families.

    Returns:
        The output, [B, S, H, E], and None for the attention weights.

    Raises:
        DloError: If an argument cannot be computed over a shared sequence.
    """
    sequence: SharedSequence | None = module.__dict__.get(_SEQUENCE)
    if sequence is None:
        raise DloError(
            f"the plan's attention modules must include all of the model's, got none of class {type(module).__name__};"
            " add its name to ParallelPlan(attention=(...))"
        )
    _refuse(module, attention_mask, others)
    score = Score(query.shape[-1] ** -0.5 if scaling is None else float(scaling), softcap)
    out = sequence.attention(query, key, value, score, sliding_window, dropout, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, mask: Tensor | None, others: dict[str, Any]) -> None:
    kind = type(module).__name__
    if mask is not None:
        raise DloError(
            "attention must have no mask of its own under context parallelism, which has documents and padding from the"
            f" batch, got {list(mask.shape)} from {kind}; set cp=1 with this family"
        )
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise DloError(f"attention must be causal for context parallelism, got is_causal=False from {kind}; set cp=1")
    if others.get("position_bias") is not None:
        raise DloError(
            f"attention must have no position bias for context parallelism, got position_bias from {kind}; set cp=1"
        )
    if others.get("output_attentions"):
        raise DloError(
            "output_attentions must be off under context parallelism, which does not keep attention weights, got True;"
            " leave it out"
        )


def _check_family(model: Any) -> None:
    kind, config = type(model).__name__, model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        raise DloError(f"attention must be causal for context parallelism, got {kind}, which is not; set cp=1")
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if strange:
        raise DloError(
            "layers must have attention over all tokens or a sliding window for context parallelism, got"
            f" {', '.join(strange)} in {kind}; set cp=1"
        )
    mixing = next((name for name, part in model.named_modules() if isinstance(part, nn.modules.conv._ConvNd)), None)
    if mixing is not None:
        raise DloError(
            f"a model must mix positions only by attention for context parallelism, got the convolution '{mixing}' in"
            f" {kind}; set cp=1"
        )
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise DloError(
            "a model's forward must take position_ids for context parallelism, got one without them from"
            f" {kind}; set cp=1"
        )


def _check_attention(module: nn.Module, name: str) -> None:
    """Checks an attention module while the model uses this implementation."""
    part: Any = module.get_submodule(name)
    kind = type(part).__name__
    if getattr(getattr(part, "config", None), "_attn_implementation", None) != IMPLEMENTATION:
        raise DloError(
            f"attention '{name}' of {type(module).__name__} must use transformers' AttentionInterface for context"
            f" parallelism, got {kind}, which does not; set cp=1, or use a family that does: llama, qwen3, gpt_neox..."
        )
    mask = find_mask(part)
    if mask is not None and mask.pattern.prefix:
        raise DloError(
            "attention.mask must be causal under context parallelism, whose ranks have no keys after their queries, got"
            " Prefix; set cp=1"
        )
