"""Makes transformers' models compute their attention over a shared sequence. All that knows transformers is here.

Written for transformers 5 (tried with 5.23): `AttentionInterface.register`, `PreTrainedModel.set_attn_implementation`,
and that no mask is made for an implementation that has none registered (`masking_utils._preprocess_mask_arguments`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_plugins.context.kernels import Score
from dlo_plugins.context.sequence import SharedSequence

#: transformers' name for this implementation. It is matched for parts such as "sdpa" and "flash", and has none of them.
IMPLEMENTATION = "dlo_shared_sequence"
#: Under this name an attention module keeps the sequence that it shares.
_SEQUENCE = "_dlo_sequence"
#: Kinds of layers (`config.layer_types`) whose only mixing of positions is attention as it is computed here.
_LAYERS = {"full_attention", "sliding_attention", "attention"}


def share_attention(module: nn.Module, attention: Sequence[str], sequence: SharedSequence) -> None:
    """Makes a model's attention modules compute over a shared sequence.

    Args:
        module: the model, of transformers or with one inside.
        attention: names of its attention modules.
        sequence: that they share.

    Raises:
        DloError: if attention cannot be reached; see :func:`check_model`.
    """
    check_model(module, attention)
    for model in outermost(module):
        model.set_attn_implementation(IMPLEMENTATION)
    for name in attention:
        module.get_submodule(name).__dict__[_SEQUENCE] = sequence


def check_model(module: nn.Module, attention: Sequence[str]) -> None:
    """Checks that attention is the only place where a model mixes positions, and that it can be reached.

    Raises:
        DloError: for models that are none of transformers' causal language models, whose attention cannot be replaced,
            that have attention sinks, or that mix positions in other ways, such as convolutions and
            state-space layers.
    """
    from transformers import AttentionInterface

    models = outermost(module)
    if not models:
        raise DloError(
            "context parallelism shares the sequence of causal language models of transformers;"
            f" {type(module).__name__} is none: use cp=1, and tp, pp or dp in its place"
        )
    for model in models:
        _check_family(model)
    if not attention:
        raise DloError(
            f"context parallelism needs the names of the attention modules, and the plan of {type(module).__name__} has"
            " none; give ParallelPlan(attention=(...))"
        )
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attention_forward))
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
    """Returns transformers' models in a module, without those inside others."""
    from transformers import PreTrainedModel

    found: list[tuple[str, Any]] = []
    for name, part in module.named_modules():
        inside = any(not outer or name.startswith(outer + ".") for outer, _ in found)
        if isinstance(part, PreTrainedModel) and not inside:
            found.append((name, part))
    return [model for _, model in found]


@contextlib.contextmanager
def own_attention(module: nn.Module, implementation: str) -> Iterator[None]:
    """Lets a model compute attention by another implementation inside the block, as if nothing were shared."""
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
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention as transformers' attention modules ask for it.

    Args:
        module: the attention module.
        query: [B, H, S, D], of this rank's positions, as are the following.
        key: [B, K, S, D].
        value: [B, K, S, E].
        attention_mask: none; who sees whom is known from the batch.
        dropout: rate of weights that are dropped.
        scaling: of scores; the width's inverse square root by default.
        sliding_window: how many tokens a token sees, itself included.
        softcap: bounds scores softly.
        **others: what else families pass.

    Returns:
        The output, [B, S, H, E]; and no attention weights.

    Raises:
        DloError: for what is not computed over a shared sequence.
    """
    sequence: SharedSequence | None = module.__dict__.get(_SEQUENCE)
    if sequence is None:
        raise DloError(
            f"context parallelism: {type(module).__name__} is not among the plan's attention modules; add its name to"
            " ParallelPlan(attention=(...))"
        )
    _refuse(module, attention_mask, others)
    score = Score(query.shape[-1] ** -0.5 if scaling is None else float(scaling), softcap)
    out = sequence.attention(query, key, value, score, sliding_window, dropout)
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, mask: Tensor | None, others: dict[str, Any]) -> None:
    kind = type(module).__name__
    if mask is not None:
        raise DloError(
            f"context parallelism knows documents and padding from the batch, and {kind} brings a mask of its own,"
            f" {list(mask.shape)}; use cp=1 with this family"
        )
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise DloError(f"context parallelism computes causal attention, {kind} asks for the other; use cp=1")
    for name, what in (("s_aux", "attention sinks"), ("position_bias", "a bias of positions")):
        if others.get(name) is not None:
            raise DloError(f"context parallelism computes attention without {what}, which {kind} has; use cp=1")
    if others.get("output_attentions"):
        raise DloError("context parallelism never holds attention weights; leave out output_attentions")


def _check_family(model: Any) -> None:
    kind, config = type(model).__name__, model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        raise DloError(f"context parallelism computes causal attention, {kind} is not causal throughout; use cp=1")
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if strange:
        raise DloError(
            f"context parallelism shares attention over all tokens or a sliding window; {kind} has layers of the kind"
            f" {', '.join(strange)}: use cp=1"
        )
    mixing = next((name for name, part in model.named_modules() if isinstance(part, nn.modules.conv._ConvNd)), None)
    if mixing is not None:
        raise DloError(
            f"context parallelism shares attention; {kind} also mixes positions in '{mixing}', a convolution: use cp=1"
        )
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise DloError(
            f"context parallelism tells a model the positions of its part of the sequence, and {kind} takes no"
            " position_ids: use cp=1"
        )


def _check_attention(module: nn.Module, name: str) -> None:
    """Checks an attention module while the model's implementation is ours."""
    part: Any = module.get_submodule(name)
    kind = type(part).__name__
    if getattr(getattr(part, "config", None), "_attn_implementation", None) != IMPLEMENTATION:
        raise DloError(
            f"context parallelism replaces attention through transformers' AttentionInterface, which '{name}' ({kind})"
            f" of {type(module).__name__} does not use; use cp=1, or a family that does: llama, qwen3, gpt_neox..."
        )
    if getattr(part, "sinks", None) is not None:
        raise DloError(f"context parallelism computes attention without attention sinks, which {kind} has; use cp=1")
