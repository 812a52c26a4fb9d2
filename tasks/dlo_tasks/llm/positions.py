"""Checks that a model has enough positions for the data's windows and for generated text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.errors import DloError
from dlo_tasks.llm.prompts import encode_prompts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Names of position tables in transformers' families: learned ones, and precomputed sines. XGLM's
#: `embed_positions.weights` is not among them, because it grows with the text.
_TABLE = re.compile(
    r"(^|\.)(wpe\.weight|positions_embed\.weight|position_embeddings\.weight|embed_positions(\.weight)?|pos_encoding)$"
)
_NAME = "max_position_embeddings"


def max_positions(config: PretrainedConfig) -> int | None:
    """Returns the number of positions in a config; None if it has none."""
    number = getattr(config.get_text_config(decoder=True), _NAME, None)
    return number if isinstance(number, int) and number > 0 else None


def position_table_size(model: PreTrainedModel) -> int | None:
    """Returns the size of a model's position table; None for a model that computes positions, as with RoPE."""
    tensors = [name for part in (model.named_parameters(), model.named_buffers()) for name, _ in part]
    return max_positions(model.config) if any(map(_TABLE.search, tensors)) else None


def check_windows(model: PreTrainedModel, seq_len: Any, *, trained: bool) -> None:
    """Checks that a model has enough positions for the data's windows; warns if it computes more than its config has.

    Models whose config has no number of positions, or scales rotary positions, are not checked.

    Args:
        model: Model, possibly on the meta device.
        seq_len: Positions per window; None if the data have no such attribute.
        trained: Whether the model has trained weights, so that its positions cannot grow.

    Raises:
        DloError: If its position table is shorter.
    """
    number = max_positions(model.config)
    if number is None or not isinstance(seq_len, int) or seq_len <= number:
        return
    name = model.config.get_text_config(decoder=True).attribute_map.get(_NAME, _NAME)
    fix = f"set data.init_args.seq_len to at most {number}" + ("" if trained else f", or config.{name} to {seq_len}")
    if position_table_size(model) is not None:
        raise DloError(f"seq_len must be at most the model's {number} positions ({name}), got {seq_len}; {fix}")
    if not _is_stretched(model.config):
        rank_zero_warn(f"seq_len {seq_len} exceeds the {number} positions that the model was made for ({name}); {fix}")


def check_generation_length(model: PreTrainedModel, prompt: int, new: int) -> None:
    """Checks that a model has a position for each token of a prompt and its completion.

    Args:
        model: Model, possibly on the meta device.
        prompt: Tokens of the longest prompt.
        new: Maximum number of new tokens; the last one needs no position.

    Raises:
        DloError: If its position table is shorter.
    """
    number = position_table_size(model)
    if number is not None and prompt + new - 1 > number:
        room = number - prompt + 1
        fix = f"set sampling.max_new_tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise DloError(
            f"sampling.max_new_tokens must be at most {max(room, 0)} after a prompt of {prompt} tokens, in a model with"
            f" {number} positions, got {new}; {fix}"
        )


def check_prompts(model: PreTrainedModel, prompts: Sequence[str | list[Any]], tokenizer: Any, new: int) -> None:
    """Checks that a model has enough positions for prompts and their completions; see :func:`check_generation_length`.

    Args:
        model: Model, possibly on the meta device.
        prompts: Prompts, as texts or conversations.
        tokenizer: Tokenizer of the data; None before it is loaded, which counts a prompt as one token.
        new: Maximum number of new tokens.

    Raises:
        DloError: If its position table is shorter.
    """
    if prompts:
        rows = [[0]] if tokenizer is None else encode_prompts(tokenizer, prompts)
        check_generation_length(model, max(map(len, rows)), new)


def _is_stretched(config: PretrainedConfig) -> bool:
    """Returns whether rotary positions are scaled (YaRN, Llama 3's, ...), in any kind of layer."""
    found: Any = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [found, *(value for value in found.values() if isinstance(value, Mapping))]
    return any(kind.get("rope_type", "default") != "default" for kind in kinds)
