"""Completes prompts with a language model, makes batches of the completions, and checks that positions suffice.

Where a strategy gathers the weights, all ranks run the model together. With a pipeline, transformers' `generate` runs
on every rank. Each of its forwards runs through the stages, and the last stage's logits are broadcast, so all ranks
choose the same next token and end together. Each stage keeps the keys and values of its own blocks. A token passes the
stages one after another, so one stage computes at a time: rows of a batch share that latency. Models with a state other
than keys and values (Mamba) write without a cache, and compute all tokens again for each one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from dlo_framework.errors import DloError, check_number
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.chat import encode_prompts, format_prompt
from dlo_tasks.language.text_settings import text_settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Sampling:
    """Options for sampling the next token; the model's own `generation_config` is ignored.

    Args:
        max_new_tokens: Maximum number of tokens per completion.
        temperature: Divisor of the logits before sampling; 0 selects the most probable token.
        top_k: Number of most probable tokens to sample from; None for all.
        top_p: Cumulative probability of the most probable tokens to sample from.
        seed: Seed of the sampling; the run's own random number generators are not advanced.

    Raises:
        DloError: If a value is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("sampling.max_new_tokens", self.max_new_tokens, "at least 1", "set it to 1 or more")
        check_number("sampling.temperature", self.temperature, "at least 0", "0 selects the most probable token")
        check_number("sampling.top_p", self.top_p, "above 0 and at most 1", "1 samples from all tokens")
        check_number("sampling.top_k", self.top_k, "at least 1", "remove it to sample from all tokens")


@torch.no_grad()
def complete_ids(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    sampling: Sampling,
    tokenizer: Any,
    together: bool,
    draws: Tensor | None = None,
    softcap: float | None = None,
    pipelined: Any = None,
) -> Tensor:
    """Returns the model's completions of prompts, `[B, T]`; rows that end early are padded.

    An encoder-decoder model writes the targets of sources. A row ends with the tokenizer's end-of-text token, or any
    `eos_token_id` of the model's `generation_config`.

    Args:
        model: Model with its weights available, as inside a step.
        input_ids: Token ids, `[B, L]`, padded on the left; those of sources, on the right.
        attention_mask: Attention mask, `[B, L]`.
        sampling: Sampling options.
        tokenizer: Tokenizer of the data; None if the special tokens are unknown.
        together: Whether all ranks run the model equally often, as often as the rank with the longest completion,
            because its weights are gathered from all ranks. All ranks must then call this, each with its own prompts.
        draws: Random number in [0, 1) of each row and new token, `[B, max_new_tokens]`, from which tokens are drawn
            with `sampling.temperature`, in place of `sampling.seed`, `top_k` and `top_p`.
        softcap: Soft bound of the logits that the model does not apply by itself.
        pipelined: Pipelined task, if the model's blocks are stages of a pipeline: all ranks of the pipeline get the
            same prompts, and return the same tokens.

    Raises:
        DloError: If the model has too few positions for these tokens.
    """
    from transformers import GenerationConfig
    from transformers.modeling_outputs import BaseModelOutput

    own: Any = model.config
    start = 1 if own.is_encoder_decoder else input_ids.shape[1]  # A decoder's own prompt is one token.
    check_generation_length(model, start, sampling.max_new_tokens)
    ends = end_tokens(model, tokenizer)
    pad = None if tokenizer is None else tokenizer.pad_token_id
    drawing: dict[str, Any] = {}
    if sampling.temperature > 0 and draws is None:
        drawing = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=bool(drawing),
        eos_token_id=ends or None,
        pad_token_id=pad if pad is not None else ends[0] if ends else 0,
        decoder_start_token_id=own.decoder_start_token_id if own.is_encoder_decoder else None,
        **drawing,
    )
    processors: list[Any] = [] if softcap is None else [SoftcappedLogits(softcap)]
    if draws is not None:
        processors.append(DrawnTokens(draws, sampling.temperature, start))
    sources: dict[str, Any] = {}
    if pipelined is not None:
        config.use_cache = keeps_keys_and_values(model)
        if own.is_encoder_decoder:  # `generate` would run the encoder alone, of which each rank has some blocks.
            sources["encoder_outputs"] = BaseModelOutput(last_hidden_state=torch.empty(0))
    devices = [input_ids.device] if input_ids.device.type == "cuda" else []
    was_training = model.training
    model.eval()
    eager = torch.compiler.set_stance("force_eager")
    staged = staged_forward(model, pipelined, input_ids if own.is_encoder_decoder else None)
    with torch.random.fork_rng(devices=devices), eager, _without_own_settings(model), staged:
        torch.manual_seed(sampling.seed)
        generate: Any = model.generate
        written: Tensor = generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=config,
            logits_processor=processors,
            synced_gpus=together,
            **sources,
        )
    model.train(was_training)
    return written[:, start:]


class SoftcappedLogits:
    """Logits processor of transformers that bounds the logits softly, as the loss does."""

    def __init__(self, softcap: float) -> None:
        self.softcap = softcap

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the logits `c * tanh(scores / c)`, `[B, V]`."""
        return self.softcap * torch.tanh(scores / self.softcap)


class DrawnTokens:
    """Logits processor of transformers that draws each row's next token by a given random number.

    Args:
        draws: Random numbers in [0, 1), `[B, T]`.
        temperature: Divisor of the logits.
        start: Number of tokens of the prompts.
    """

    def __init__(self, draws: Tensor, temperature: float, start: int) -> None:
        self.draws, self.temperature, self.start = draws, temperature, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores, `[B, V]`, that are finite for the drawn token alone."""
        cumulative = torch.softmax(scores.double() / self.temperature, 1).cumsum(1)  # [B, V]
        drawn = self.draws[:, input_ids.shape[1] - self.start, None] * cumulative[:, -1:]  # [B, 1]
        # The first token whose cumulative probability is above the number: its own is above 0.
        tokens = torch.searchsorted(cumulative, drawn, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)


@contextlib.contextmanager
def _without_own_settings(model: PreTrainedModel) -> Iterator[None]:
    """Replaces a model's own `generation_config` by the default one inside the context, without losses of routers.

    transformers (5.17, `GenerationMixin._prepare_generation_config`) fills unset options from the model's config, and
    some options, such as `suppress_tokens`, cannot be overridden. Its load-balancing loss (5.24) fails in a step of
    generation, whose mask is longer than its tokens.
    """
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    config: Any = model.config.get_text_config()
    logits = text_settings(config).output_router_logits
    if logits:
        config.output_router_logits = False
    try:
        yield
    finally:
        model.generation_config = own
        if logits:
            config.output_router_logits = logits


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Returns the tokens that end a text: the tokenizer's, and the model's, such as the end of a chat turn."""
    own: Any = model.generation_config.eos_token_id
    tokens = [] if tokenizer is None else [tokenizer.eos_token_id]
    tokens += own if isinstance(own, list | tuple) else [own]
    return list(dict.fromkeys(token for token in tokens if token is not None))


def as_markdown(prompts: Sequence[str | list[dict[str, Any]]], texts: Sequence[str]) -> str:
    """Returns samples in Markdown: each prompt with its completion, as a code block."""
    pairs = zip(map(format_prompt, prompts), texts, strict=True)
    blocks = (f"{prompt}⟶{text}".splitlines() for prompt, text in pairs)
    return "\n\n".join("\n".join(f"    {line}" for line in block) for block in blocks)


def print_samples(prompts: Sequence[str | list[dict[str, Any]]], texts: Sequence[str]) -> None:
    """Prints prompts, each with its completion."""
    print("\nsamples, each a prompt⟶completion:")
    for prompt, text in zip(map(format_prompt, prompts), texts, strict=True):
        print(f"---\n{prompt}⟶{text}")


#: Names of the cache in transformers' forwards: that of 5.24, and that of earlier versions.
_CACHES = ("cache", "past_key_values")


def keeps_keys_and_values(model: PreTrainedModel) -> bool:
    """Returns whether the state of a model's generation is keys and values only, of which each stage keeps its own.

    That of an encoder-decoder is also the encoder's output, which the last of its stages has.

    A reach into transformers (5.24): whether `generate` makes a `DynamicCache` is a private method, and the kinds of
    its layers are those of the config.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    own: Any = model
    if own.config.is_encoder_decoder or not own._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


@contextlib.contextmanager
def staged_forward(model: PreTrainedModel, pipelined: Any, sources: Tensor | None = None) -> Iterator[None]:
    """Makes a model's forward run through the pipeline's stages inside the context, with its logits on all ranks.

    `generate` has no argument for another forward: this replaces the method of this one model, and restores it.

    Args:
        model: Model of which this rank holds some stages.
        pipelined: Pipelined task of the strategy; None without a pipeline, where nothing changes.
        sources: Sources of an encoder-decoder, `[B, S]`, which run through the encoder in each forward.
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
        if sources is not None:
            sent["input_ids"], kept["encoder_outputs"] = sources, None
        name = next((name for name in _CACHES if kept.get(name) is not None), None)
        if name is not None and not caches:
            caches.append(kept[name])
            caches.extend(copy.deepcopy(kept[name]) for _ in range(pipelined.stages_per_rank - 1))
        stages = iter(caches)

        def run_stage(part: dict[str, Tensor]) -> Tensor:  # Called for each stage of this rank, in their order.
            cache = {} if name is None else {name: next(stages)}
            stage_logits: Tensor = own(**{**kept, **cache}, **part).logits
            return stage_logits

        logits = pipelined.run_on_all_ranks(sent, run_stage)
        if name is None:
            return CausalLMOutputWithPast(logits=logits)
        for cache in caches:
            _count_tokens(cache, logits)
        return CausalLMOutputWithPast(logits=logits, **{name if name in names else _CACHES[1]: caches[0]})

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


def find_prompts(batch: Any, prompt_tokens: int | None) -> list[list[int]]:
    """Returns the prompt of each row of a batch, at least one token.

    Args:
        batch: Batch with `input_ids` and `labels`, `[B, L]`, and maybe an `attention_mask`.
        prompt_tokens: Number of tokens of a prompt; None for the tokens before a row's first target. A row of padding
            alone has its first token as the prompt.
    """
    ids, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    mask = batch.get("attention_mask")
    masks = [[1] * len(row) for row in ids] if mask is None else mask.tolist()
    prompts = []
    for row, targets, kept in zip(ids, labels, masks, strict=True):
        length = prompt_tokens
        if length is None:  # The label at a position is the next token.
            length = 1 + next((place for place, target in enumerate(targets) if target != IGNORE_INDEX), 0)
        begin = next((place for place, is_token in enumerate(kept) if is_token), 0)
        end = max(begin + 1, length if prompt_tokens is None else begin + length)
        prompts.append(row[begin:end])
    return prompts


def draw_for_rows(batch: Any, count: int, seed: int) -> Tensor:
    """Returns uniform random numbers in [0, 1) for each row of a batch, `[B, count]`, float64.

    They depend on the seed and on the row's tokens and targets, not on its place: a row has the same on any rank and in
    any batch.

    Args:
        batch: Batch with `input_ids` and `labels`, `[B, L]`, and maybe an `attention_mask`.
        count: Number of random numbers of a row.
        seed: Seed.
    """
    labels = batch["labels"].tolist()
    rows = []
    for prompt, targets in zip(find_prompts(batch, None), labels, strict=True):
        content = np.array([*prompt, -1, *(target for target in targets if target != IGNORE_INDEX)], dtype=np.int64)
        key = int.from_bytes(hashlib.blake2b(content.tobytes(), digest_size=16).digest(), "little")
        rows.append(np.random.default_rng([seed, key]).random(count))
    return torch.from_numpy(np.stack(rows))


def join_completions(
    prompts: Sequence[Sequence[int]],
    written: Sequence[Sequence[int]],
    ends: Collection[int],
    device: torch.device,
    multiple: int = 1,
) -> dict[str, Tensor]:
    """Returns a batch of prompts with their completions, padded on the right; its targets are the completions.

    Padding is after all tokens of its row, which do not see it, so that no mask is needed.

    Args:
        prompts: Token ids of the prompts.
        written: Token ids of the completions, padded after the first of `ends`.
        ends: Tokens that end a completion.
        device: Device of the batch.
        multiple: Multiple to which rows are padded.
    """
    rows, targets = [], []
    for prompt, completion in zip(prompts, written, strict=True):
        stop = next((place for place, token in enumerate(completion) if token in ends), len(completion) - 1)
        tokens = [*prompt, *completion[: stop + 1]]
        rows.append(tokens[:-1])
        targets.append([IGNORE_INDEX] * (len(prompt) - 1) + tokens[len(prompt) :])
    longest = -(-max(map(len, rows)) // multiple) * multiple
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    labels = [row + [IGNORE_INDEX] * (longest - len(row)) for row in targets]
    positions = torch.arange(longest, device=device).expand(len(rows), -1).contiguous()
    return {"input_ids": ids, "labels": torch.tensor(labels, device=device), "position_ids": positions}


# --- positions: enough for the data's windows and for generated text ----------------------------------------------

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


def check_windows(model: PreTrainedModel, seq_len: Any, *, trained: bool, option: str = "seq_len") -> None:
    """Checks that a model has enough positions for the data's windows; warns if it computes more than its config has.

    Models whose config has no number of positions, or scales rotary positions, are not checked.

    Args:
        model: Model, possibly on the meta device.
        seq_len: Positions per window; None if the data have no such attribute.
        trained: Whether the model has trained weights, so that its positions cannot grow.
        option: Name of the data's option.

    Raises:
        DloError: If its position table is shorter.
    """
    number = max_positions(model.config)
    if number is None or not isinstance(seq_len, int) or seq_len <= number:
        return
    name = model.config.get_text_config(decoder=True).attribute_map.get(_NAME, _NAME)
    fix = f"set data.init_args.{option} to at most {number}" + ("" if trained else f", or config.{name} to {seq_len}")
    if position_table_size(model) is not None:
        raise DloError(f"{option} must be at most the model's {number} positions ({name}), got {seq_len}; {fix}")
    if not _is_stretched(model.config):
        rank_zero_warn(f"{option} {seq_len} exceeds the {number} positions that the model was made for ({name}); {fix}")


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
    parameters = text_settings(config.get_text_config(decoder=True)).rope_parameters
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    return any(kind.get("rope_type", "default") != "default" for kind in kinds)
