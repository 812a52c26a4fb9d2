"""How many positions a model has, and what would need more of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.errors import DloError
from dlo_tasks.llm.encode import encode_open

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Tables with a row a position, as transformers' families name them: learned ones, and sines computed in advance. Those
#: of XGLM, `embed_positions.weights`, are not among them: they become more when a text is longer.
_TABLE = re.compile(
    r"(^|\.)(wpe\.weight|positions_embed\.weight|position_embeddings\.weight|embed_positions(\.weight)?|pos_encoding)$"
)
_NAME = "max_position_embeddings"


def positions_of(config: PretrainedConfig) -> int | None:
    """Returns the positions that a config says its model is made for; None where it says nothing."""
    number = getattr(config.get_text_config(decoder=True), _NAME, None)
    return number if isinstance(number, int) and number > 0 else None


def rows_of_positions(model: PreTrainedModel) -> int | None:
    """Returns how many positions a model has a table of; None for one that computes them, as with RoPE."""
    tensors = [name for part in (model.named_parameters(), model.named_buffers()) for name, _ in part]
    return positions_of(model.config) if any(map(_TABLE.search, tensors)) else None


def check_windows(model: PreTrainedModel, seq_len: Any, *, trained: bool) -> None:
    """Checks that a model has as many positions as the data's windows; warns where it computes more than it knows.

    Says nothing of models whose config has no number of them, or stretches rotary positions.

    Args:
        model: may be on the meta device.
        seq_len: positions of a window; None where the data do not say.
        trained: whether its weights are given, so that its positions cannot become more.

    Raises:
        DloError: if it has a table with fewer.
    """
    number = positions_of(model.config)
    if number is None or not isinstance(seq_len, int) or seq_len <= number:
        return
    name = model.config.get_text_config(decoder=True).attribute_map.get(_NAME, _NAME)
    fix = f"set data.init_args.seq_len to at most {number}" + ("" if trained else f", or config.{name} to {seq_len}")
    if rows_of_positions(model) is not None:
        raise DloError(f"windows of seq_len {seq_len} do not fit a model with {number} positions ({name}); {fix}")
    if not _is_stretched(model.config):
        rank_zero_warn(f"seq_len {seq_len} is beyond the {number} positions that the model is made for ({name}); {fix}")


def check_room(model: PreTrainedModel, prompt: int, new: int) -> None:
    """Checks that a model has a position for each token of a prompt and of what is written behind it.

    Args:
        model: may be on the meta device.
        prompt: tokens of the longest prompt.
        new: the most tokens that are written; the last one is not read again.

    Raises:
        DloError: if it has a table with fewer.
    """
    number = rows_of_positions(model)
    if number is not None and prompt + new - 1 > number:
        room = number - prompt + 1
        fix = f"set sampling.max_new_tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise DloError(
            f"{new} new tokens (sampling.max_new_tokens) behind a prompt of {prompt} do not fit a model with {number}"
            f" positions; {fix}"
        )


def check_prompts(model: PreTrainedModel, prompts: Sequence[str], tokenizer: Any, new: int) -> None:
    """Checks that prompts and what is written behind them fit; arguments as :func:`check_room` has them.

    Args:
        model: may be on the meta device.
        prompts: texts.
        tokenizer: of the data; None before they are there, which counts a prompt as one token.
        new: the most tokens that are written.

    Raises:
        DloError: if they do not.
    """
    if prompts:
        rows = [[0]] if tokenizer is None else encode_open(tokenizer, list(prompts))
        check_room(model, max(map(len, rows)), new)


def _is_stretched(config: PretrainedConfig) -> bool:
    """Returns whether rotary positions are scaled (YaRN, Llama 3's, ...), in any kind of layer."""
    found: Any = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [found, *(value for value in found.values() if isinstance(value, Mapping))]
    return any(kind.get("rope_type", "default") != "default" for kind in kinds)
