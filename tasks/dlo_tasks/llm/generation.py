"""What a model writes: completions of prompts, on all ranks together where a strategy gathers its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_tasks.llm.encode import encode_open
from dlo_tasks.llm.positions import check_room

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: by this alone, whatever else the model's `generation_config` says.

    Args:
        max_new_tokens: most tokens that are written to a prompt.
        temperature: 0 takes the likeliest token; else logits are divided by it, and a token is drawn.
        top_k: draws among so many of the likeliest only; None for all.
        top_p: draws among the likeliest that have so much of the probability together.
        seed: of what is drawn; no draw touches the run's own random numbers.

    Raises:
        DloError: for numbers that cannot be.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise DloError(f"sampling: max_new_tokens is at least 1, given {self.max_new_tokens}")
        if self.temperature < 0:
            raise DloError(f"sampling: temperature is at least 0, given {self.temperature}; 0 takes the likeliest")
        if not 0 < self.top_p <= 1:
            raise DloError(f"sampling: top_p lies in (0, 1], given {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise DloError(f"sampling: top_k is at least 1, given {self.top_k}; leave it out for all tokens")


def left_padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns prompts as `[B, L]` ids and their attention mask, padded in front: new tokens come behind all of them."""
    longest = max(map(len, rows))
    ids = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@torch.no_grad()
def complete(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    sampling: Sampling,
    tokenizer: Any,
    together: bool,
) -> Tensor:
    """Returns what the model writes behind prompts, `[B, T]`; rows that end early are padded.

    A row ends with the tokenizer's end of text, or with any token at which the model's own `generation_config` ends.

    Args:
        model: with its weights at hand, as inside a step.
        input_ids: `[B, L]`, padded in front.
        attention_mask: `[B, L]`.
        sampling: how tokens are chosen.
        tokenizer: of the data; None if nobody knows the special tokens.
        together: whether all ranks run the model as often as the one that needs most steps, because its weights are
            gathered from all of them; all ranks call this then, each with its own prompts.

    Raises:
        DloError: if the model has no position for all of these tokens.
    """
    from transformers import GenerationConfig

    check_room(model, input_ids.shape[1], sampling.max_new_tokens)
    ends = end_tokens(model, tokenizer)
    pad = getattr(tokenizer, "pad_token_id", None)
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=sampling.temperature > 0,
        eos_token_id=ends or None,
        pad_token_id=pad if pad is not None else ends[0] if ends else 0,
        **_drawing(sampling),
    )
    devices = [model.device] if model.device.type == "cuda" else []
    was_training = model.training
    model.eval()
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices=devices), eager, _without_own_settings(model):
        torch.manual_seed(sampling.seed)
        generate: Any = model.generate
        written: Tensor = generate(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=config, synced_gpus=together
        )
    model.train(was_training)
    return written[:, input_ids.shape[1] :]


@contextlib.contextmanager
def _without_own_settings(model: PreTrainedModel) -> Iterator[None]:
    """Takes a model's own `generation_config` away for a while.

    transformers (5.17, `GenerationMixin._prepare_generation_config`) takes from it all that it is not told otherwise,
    and has settings, such as `suppress_tokens`, that cannot be told otherwise.
    """
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Returns the tokens that end a text: the tokenizer's, and those of the model, such as the end of a chat's turn."""
    own: Any = getattr(model.generation_config, "eos_token_id", None)
    found = [getattr(tokenizer, "eos_token_id", None), *(own if isinstance(own, list | tuple) else [own])]
    return list(dict.fromkeys(token for token in found if token is not None))


def _drawing(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0:
        return {}
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}


def continuations(
    model: PreTrainedModel, prompts: Sequence[str], sampling: Sampling, tokenizer: Any, together: bool
) -> list[str]:
    """Returns what the model writes behind each prompt, as text; arguments as :func:`complete` has them.

    Raises:
        DloError: if a prompt has no tokens.
    """
    rows = encode_open(tokenizer, list(prompts))
    empty = next((prompt for prompt, row in zip(prompts, rows, strict=True) if not row), None)
    if empty is not None:
        raise DloError(f"prompts: {empty!r} has no tokens; give a prompt of at least one character")
    pad = tokenizer.pad_token_id
    ids, mask = left_padded(rows, 0 if pad is None else pad, model.device)
    written = complete(model, ids, mask, sampling, tokenizer, together)
    return [str(text) for text in tokenizer.batch_decode(written, skip_special_tokens=True)]


def as_markdown(prompts: Sequence[str], texts: Sequence[str]) -> str:
    """Returns samples for TensorBoard: each prompt in front of its continuation, as a block of code."""
    return "\n\n".join(_indented(f"{prompt}⟶{text}") for prompt, text in zip(prompts, texts, strict=True))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
