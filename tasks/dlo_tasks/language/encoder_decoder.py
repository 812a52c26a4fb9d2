"""Runs encoder-decoder models of transformers: both stacks up to the head, with documents of packed rows kept apart.

A row may hold several pairs of source and target. Segment ids, as in T5X, number the pairs from 1 in both sequences of
a row; 0 is padding. A token attends to tokens of its own segment only, in the encoder, in the decoder and from the
decoder to the encoder.

Shapes: B rows, S positions of sources, T positions of targets, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.chat import encode_without_end
from dlo_tasks.language.text_settings import text_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def set_start_token(config: Any, *, trained: bool) -> None:
    """Sets the token with which targets begin in a config for random weights that does not set it.

    Args:
        config: Config of a model, changed in place.
        trained: Whether the model has trained weights.

    Raises:
        DloError: If the model is not an encoder-decoder, or it has trained weights and no such token.
    """
    if not config.is_encoder_decoder:
        raise DloError(
            "config.model_type must be an encoder-decoder for Seq2SeqLM, such as t5 or bart, got"
            f" {config.model_type}; use CausalLM or MaskedLM"
        )
    if text_settings(config).decoder_start_token_id is None:
        config.decoder_start_token_id = None if trained else default_start_token(config)
    if config.decoder_start_token_id is None:
        raise DloError(
            "config.decoder_start_token_id must be set to the token with which targets begin, got none in"
            f" {config.model_type}; add it to the model's config"
        )


def default_start_token(config: Any) -> int | None:
    """Returns the start token of a model with random weights: the token that is it by the family's defaults.

    That is the end-of-text token of BART. Families without a default have the padding token, as T5, or T5Gemma's
    beginning-of-text token.
    """
    family = type(config)()
    start = text_settings(family).decoder_start_token_id
    names = ["pad_token_id", "eos_token_id", "bos_token_id"]
    own = [name for name in names if start is not None and getattr(family, name, None) == start]
    if "decoder" in config.sub_configs:
        config, names = config.decoder, names[::-1]
    return next((token for name in (*own, *names) if (token := getattr(config, name, None)) is not None), None)


def shift_right(labels: Tensor, start: int, pad: int, segment_ids: Tensor | None = None) -> Tensor:
    """Returns the decoder's inputs for labels, `[B, T]`: the start token, then each label before the last.

    Args:
        labels: Ids of the targets' tokens, `[B, T]`, -100 at unused positions.
        start: Start token, also of each target of a packed row.
        pad: Id in place of -100.
        segment_ids: Segment of each label, `[B, T]`, of packed rows.
    """
    shifted = labels.roll(1, dims=1)
    shifted[:, 0] = start
    if segment_ids is not None:
        begins = segment_ids[:, 1:] != segment_ids[:, :-1]
        shifted[:, 1:] = shifted[:, 1:].masked_fill(begins, start)
    return shifted.masked_fill(shifted == IGNORE_INDEX, pad)


def decoder_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    decoder_input_ids: Tensor,
    attention_mask: Tensor | None = None,
    encoder_segment_ids: Tensor | None = None,
    decoder_segment_ids: Tensor | None = None,
) -> Tensor:
    """Returns the decoder's hidden states, `[B, T, D]`, from which the output projection computes the logits.

    Those of T5 and Switch Transformers are scaled, as in transformers (5.24), where the embedding is also the head.

    Args:
        model: Model with an encoder and a decoder.
        input_ids: Ids of the sources, `[B, S]`.
        decoder_input_ids: Ids of the targets, shifted right, `[B, T]`.
        attention_mask: 1 at tokens of the sources and 0 at padding, `[B, S]`.
        encoder_segment_ids: Segment of each token of the sources, `[B, S]`, of packed rows.
        decoder_segment_ids: Segment of each token of the targets, `[B, T]`, of packed rows.
    """
    masks: tuple[Tensor | None, ...] = (attention_mask, None, attention_mask)
    if encoder_segment_ids is not None and decoder_segment_ids is not None:
        masks = segment_masks(model, encoder_segment_ids, decoder_segment_ids)
    own: Any = model
    source = own.get_encoder()(input_ids=input_ids, attention_mask=masks[0])[0]
    states: Tensor = own.get_decoder()(
        input_ids=decoder_input_ids,
        attention_mask=masks[1],
        encoder_hidden_states=source,
        encoder_attention_mask=masks[2],
        use_cache=False,
    )[0]
    config: Any = model.config
    switch = config.model_type == "switch_transformers" and config.tie_word_embeddings
    return states * config.d_model**-0.5 if switch or text_settings(config).scale_decoder_outputs else states


def segment_masks(model: PreTrainedModel, encoder_ids: Tensor, decoder_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the masks of the encoder, the decoder and the attention from the decoder to the encoder.

    They are `[B, 1, S, S]`, `[B, 1, T, T]` and `[B, 1, T, S]`, which transformers (5.24) passes on as they are: bool
    for its attention `sdpa`, added to the scores for `eager`.
    """
    length = decoder_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=decoder_ids.device).tril()
    target = decoder_ids[:, None, :, None]
    allowed = (
        encoder_ids[:, None, :, None] == encoder_ids[:, None, None, :],
        (target == decoder_ids[:, None, None, :]) & causal,
        (target == encoder_ids[:, None, None, :]) | (target == 0),  # Each row of scores has a finite one.
    )
    if model.config._attn_implementation != "eager":
        return allowed
    lowest = torch.finfo(torch.promote_types(model.dtype, torch.float16)).min / 2
    lowest = max(lowest, torch.finfo(torch.float32).min / 2)  # Eager attention computes its softmax in float32.
    encoder, decoder, cross = (
        torch.zeros(one.shape, dtype=model.dtype, device=one.device).masked_fill(~one, lowest) for one in allowed
    )
    return encoder, decoder, cross


def encode_sources(tokenizer: Any, texts: Sequence[Any]) -> list[list[int]]:
    """Returns the token ids of sources or targets, each with the end-of-text token, if there is one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [[*ids, *end] for ids in encode_without_end(tokenizer, list(texts))]
