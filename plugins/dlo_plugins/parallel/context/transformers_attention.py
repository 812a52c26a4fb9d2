"""Interface to transformers' models: they compute their attention over a shared sequence.

Written for transformers 5 (tried with 5.23): `AttentionInterface.register`, `PreTrainedModel.set_attn_implementation`,
and no mask for an implementation without a registered one (`masking_utils._preprocess_mask_arguments`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.models.attention.attention_mask import find_heads, find_mask
from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.context.block_attention import Score
from dlo_plugins.parallel.context.context_sequence import ContextSequence
from dlo_plugins.parallel.context.gathered_modules import Gather, GatheredModules, SharedParts, find_parts

#: Name of this implementation in transformers, which searches names for "sdpa" and "flash": it contains neither.
IMPLEMENTATION = "dlo_shared_sequence"
#: Attribute in which an attention module keeps its shared sequence.
_SEQUENCE = "_dlo_sequence"


def share_attention(
    module: nn.Module, plan: ParallelPlan, sequence: ContextSequence, gather: Gather = "auto"
) -> GatheredModules | None:
    """Makes a model compute over a shared sequence.

    Args:
        module: Model of transformers, or one with such a model inside.
        plan: Plan of the model, with its blocks and attention.
        sequence: Shared sequence of the attention modules.
        gather: Modules that are gathered; see :func:`dlo_plugins.parallel.context.gathered_modules.find_parts`.

    Returns:
        The modules that get full sequences; None if there are none.

    Raises:
        DloError: If the model cannot be shared; see :func:`check_model`.
    """
    parts = check_model(module, plan, gather)
    if parts.attention:
        for model in outermost(module):
            model.set_attn_implementation(IMPLEMENTATION)
    for name in parts.attention:
        part = module.get_submodule(name)
        part.__dict__[_SEQUENCE] = sequence
        mask = find_mask(part)
        if mask is not None:
            sequence.set_mask(mask, find_heads(part))
    if not parts.gathered and not parts.needs_full_inputs:
        return None
    sequence.keeps_positions = True
    gathering = GatheredModules(sequence)
    gathering.install(module, parts, _holders(module, parts.blocks))
    return gathering


def check_model(module: nn.Module, plan: ParallelPlan, gather: Gather = "auto") -> SharedParts:
    """Checks that the sequence of a model can be shared; returns what is done with its modules.

    Raises:
        DloError: If the model is not a causal language model of transformers, or its attention cannot be replaced.
    """
    from transformers import AttentionInterface

    models = outermost(module)
    if not models:
        raise DloError(
            "the model must be a causal language model of transformers for context parallelism, got"
            f" {type(module).__name__}; set cp=1, and use tp, pp or dp instead"
        )
    for model in models:
        config = model.config.get_text_config()
        if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
            raise DloError(_causal_error(f"{type(model).__name__}, which is not"))
    parts = find_parts(module, models, plan, gather)
    if not parts.attention and not parts.gathered:
        raise DloError(
            "a plan must have the names of the attention modules for context parallelism, got none from"
            f" {type(module).__name__}; set ParallelPlan(attention=(...))"
        )
    if not parts.attention:
        return parts
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    before = [model.config._attn_implementation for model in models]
    try:
        for model in models:
            model.set_attn_implementation(IMPLEMENTATION)
        for name in parts.attention:
            part: Any = module.get_submodule(name)
            if getattr(getattr(part, "config", None), "_attn_implementation", None) != IMPLEMENTATION:
                raise DloError(
                    f"attention '{name}' of {type(module).__name__} must use transformers' AttentionInterface for"
                    f" context parallelism, got {type(part).__name__}, which does not; set cp=1, or use a family that"
                    " does: llama, qwen3, gpt_neox..."
                )
    finally:
        for model, implementation in zip(models, before, strict=True):
            model.set_attn_implementation(implementation)
    return parts


def _holders(module: nn.Module, blocks: Sequence[str]) -> list[nn.Module]:
    """Returns the models of transformers that hold blocks, from the outermost to the innermost."""
    from transformers import PreTrainedModel

    return [
        part
        for name, part in module.named_modules()
        if isinstance(part, PreTrainedModel) and any(not name or block.startswith(f"{name}.") for block in blocks)
    ]


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
    sequence: ContextSequence | None = module.__dict__.get(_SEQUENCE)
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
            f" batch, got {list(mask.shape)} from {kind}; set gather: all of ContextParallel"
        )
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise DloError(_causal_error(f"is_causal=False from {kind}"))
    if others.get("position_bias") is not None:
        raise DloError(
            f"attention must have no position bias for context parallelism, got position_bias from {kind}; set gather:"
            " all of ContextParallel"
        )
    if others.get("output_attentions"):
        raise DloError(
            "output_attentions must be off under context parallelism, which does not keep attention weights, got True;"
            " leave it out"
        )


def _causal_error(got: str) -> str:
    return f"attention must be causal for context parallelism, got {got}; set cp=1"
