"""Reads the settings of transformers' configs that only some families have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class TextSettings:
    """Settings of a text model's config, by transformers' names; where a config has none, or None, the default.

    Attributes:
        layer_types: Type of attention of each block.
        sliding_window: Number of positions that sliding attention sees.
        use_sliding_window: Whether any block uses `sliding_window`.
        attention_chunk_size: Number of positions of a chunk of attention (Llama 4).
        use_bidirectional_attention: Whether tokens attend to later ones.
        attn_logit_softcapping: Soft bound of attention scores (Gemma 2).
        final_logit_softcapping: Soft bound of the logits (Gemma 2).
        logits_soft_cap: The same in RecurrentGemma.
        logit_scale: Factor of the logits (Cohere).
        logits_scaling: Divisor of the logits (Granite).
        output_router_logits: Whether the loss has the load-balancing loss of transformers.
        num_attention_heads: Number of heads of queries.
        num_key_value_heads: Number of heads of keys and values.
        head_dim: Width of a head.
        hidden_size: Width of the model.
        rope_parameters: Options of rotary positions, or those of each type of layer.
        activation_sparsity_pattern: Share of zeros among the activations of each block's MLP (Gemma 3n).
        decoder_start_token_id: Token with which an encoder-decoder's targets begin.
        pad_token_id: Padding token.
        scale_decoder_outputs: Whether the decoder's outputs are scaled before the head (T5).
        rescale_every: Number of blocks between the divisions of weights in evaluation (RWKV).
    """

    layer_types: Sequence[str] = ()
    sliding_window: Any = None
    use_sliding_window: bool = True
    attention_chunk_size: int | None = None
    use_bidirectional_attention: Any = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    logits_soft_cap: float | None = None
    logit_scale: float | None = None
    logits_scaling: float | None = None
    output_router_logits: bool = False
    num_attention_heads: int = 1
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_size: int = 0
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    activation_sparsity_pattern: Sequence[float] = ()
    decoder_start_token_id: int | None = None
    pad_token_id: int | None = None
    scale_decoder_outputs: bool = False
    rescale_every: int = 0


def text_settings(config: PretrainedConfig) -> TextSettings:
    """Returns the settings of a text model's config."""
    values = {each.name: getattr(config, each.name, None) for each in fields(TextSettings)}
    return TextSettings(**{name: value for name, value in values.items() if value is not None})
