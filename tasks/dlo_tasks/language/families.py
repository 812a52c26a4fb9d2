"""Tests the properties of unknown model families on six tokens before training: causality, packing, head.

A model on the meta device, or whose attention runs only on an accelerator, is tested with a twin: one block of each
type, with random weights in strided tensors that need little memory.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensor
from dlo_framework.frozen_model import default_dtype
from dlo_tasks.language import document_isolation, language_models, packed_attention, sparse_attention
from dlo_tasks.language.batches import count_documents, single_documents
from dlo_tasks.language.document_isolation import FORWARD_FAILURES, DocumentSpans, Isolation, near
from dlo_tasks.language.encoder_decoder import decoder_states
from dlo_tasks.language.packed_attention import document_lengths
from dlo_tasks.language.text_settings import text_settings
from dlo_tasks.language.tokenizer import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Families that need no test: their logits are their head's output, scaled and soft-capped as in
#: :func:`dlo_tasks.language.language_models.find_head`, and documents with restarting positions do not attend to each
#: other. Others are tested on a few tokens.
KNOWN = frozenset(
    {"cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite"}
    | {"llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"}
)
#: transformers' name for attention on a twin in place of a flash kernel. It must not contain "sdpa" or "flash".
_STAND_IN = "dlo_by_lengths"


class Traits(NamedTuple):
    """Properties of a model.

    Attributes:
        isolates_documents: Whether restarting positions keep documents in one row apart, with `isolation` where it is
            set.
        positions_from_0: Whether it takes `position_ids`, and its default ones are 0, 1, 2...; RoBERTa's begin after
            its padding token.
        has_linear_head: Whether logits are the head's output, scaled and soft-capped, so that they can be computed in
            chunks.
        isolation: Changes to the model that keep documents apart, where its positions alone do not.
    """

    isolates_documents: bool
    positions_from_0: bool
    has_linear_head: bool
    isolation: Isolation | None = None


KNOWN_TRAITS = Traits(isolates_documents=True, positions_from_0=True, has_linear_head=True)


def is_flash(model: PreTrainedModel) -> bool:
    """Returns whether a flash kernel computes attention, which takes documents by their lengths only.

    The name is matched as in transformers (`is_flash_attention_requested`, 5.17 to 5.23).
    """
    return "flash" in (model.config._attn_implementation or "")


def document_arguments(model: PreTrainedModel, inputs: Mapping[str, Tensor], *, packs: bool) -> dict[str, Any]:
    """Returns keyword arguments that pass document boundaries to attention kernels that need them.

    Args:
        model: Model that is called.
        inputs: Inputs of the model: `input_ids [B, L]`, optional `position_ids [B, L]`, and `attention_mask` of padded
            rows.
        packs: Whether restarting positions keep documents apart; see :func:`probe_traits`.

    Raises:
        DloError: If documents would attend to each other.
    """
    positions = inputs.get("position_ids")
    if positions is None:
        if sparse_attention.is_masked(model):
            return sparse_attention.mask_arguments(inputs)
        if packed_attention.is_packed_attention(model) and "attention_mask" not in inputs:
            return packed_attention.attention_arguments(model, single_documents(inputs["input_ids"]))
        return {}
    flash = is_flash(model)
    if not packs and count_documents(positions).restart:
        other = ", or attention: sdpa" if flash else ""
        raise DloError(
            f"data.init_args.packing must be none for {type(model).__name__}, which ignores restarting positions, got"
            f" packed rows, whose documents would attend to each other; set packing: none{other}"
        )
    if sparse_attention.is_masked(model):
        return sparse_attention.mask_arguments(inputs)
    if "attention_mask" in inputs:
        return {}
    if packed_attention.is_packed_attention(model):
        return packed_attention.attention_arguments(model, positions)
    return flash_arguments(positions) if flash else {}


def isolated_documents(position_ids: Tensor | None) -> DocumentSpans | None:
    """Returns the documents of packed rows for :mod:`document_isolation`; None for rows of one document each.

    With several processes, rows of one document have them too: all ranks make equal numbers of calls.
    """
    if position_ids is None or isinstance(position_ids, FakeTensor) or position_ids.is_meta:
        return None
    if not count_documents(position_ids).restart and not dist.is_initialized():
        return None
    return document_isolation.document_spans(position_ids)


def enable_packed_attention(model: PreTrainedModel, device: torch.device) -> None:
    """Switches a model from `sdpa` to packed attention without a dense mask, if the model and the device support it.

    Unknown families are compared with the dense mask first, on a twin with a sliding window of two tokens.

    Args:
        model: Model to switch.
        device: Device of the run.
    """
    config = language_models.text_config(model.config)
    if model.config._attn_implementation != "sdpa" or not packed_attention.is_supported(config, device):
        return
    packed_attention.register_attention()
    if model.config.model_type in KNOWN or matches_dense_mask(model):
        model.set_attn_implementation(packed_attention.NAME)


@torch.no_grad()
@default_dtype(torch.float32)
def matches_dense_mask(model: PreTrainedModel) -> bool:
    """Returns whether packed attention and a dense mask give equal outputs, for two rows on a twin."""
    packed_attention.register_attention()
    try:
        twin = small_copy(model, window=2, attention="sdpa")
        tokens = ordinary_tokens(twin)
        rows = torch.tensor([tokens, tokens[::-1]])
        positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
        twin.eval()
        expected = language_models.hidden_states(twin, input_ids=rows, position_ids=positions)
        twin.set_attn_implementation(packed_attention.NAME)
        told = packed_attention.attention_arguments(twin, positions)
        packed = language_models.hidden_states(twin, input_ids=rows, position_ids=positions, **told)
        return "cu_seq_lens_q" in told and near(packed, expected)
    except (*FORWARD_FAILURES, DloError):  # such as a family without transformers' attention interface
        return False


def flash_arguments(position_ids: Tensor) -> dict[str, Any]:
    """Returns keyword arguments with the document boundaries of packed rows, for flash kernels; {} without packing.

    Flash kernels take no mask. transformers (5.17 to 5.23) finds documents by their positions only in a batch of one
    row, and otherwise lets all tokens of a row attend to each other. It passes given boundaries to the kernels, with
    all rows concatenated.

    Args:
        position_ids: Positions, `[B, L]`; a document begins with each row, and wherever they do not increase by one.
    """
    number, longest, _ = count_documents(position_ids)
    if number == len(position_ids):
        return {}
    return document_lengths(position_ids, number, longest)


@torch.no_grad()
def probe_traits(model: PreTrainedModel) -> Traits:
    """Returns the properties of a model, tested on a few tokens for unknown families.

    Args:
        model: Model with its weights, or on the meta device.

    Raises:
        DloError: If a token attends to later tokens, which it must predict, or the model cannot be tested.
    """
    if model.config.model_type in KNOWN and not text_settings(model.config).use_bidirectional_attention:
        return KNOWN_TRAITS
    flash = is_flash(model)
    tried = small_copy(model) if flash or next(model.parameters()).is_meta else model
    was_training = tried.training
    tried.eval()
    try:
        # The caller may be under the meta device, and dtypes of computed constants are those of the weights.
        with torch.device(tried.device), default_dtype(None if tried is model else torch.float32):
            _check_causal(tried)
            traits = Traits(
                isolates_documents=_keeps_apart_by_lengths(tried) if flash else _keeps_apart(tried),
                positions_from_0=_counts_from_0(tried),
                has_linear_head=_projects(tried),
            )
            return traits if traits.isolates_documents or flash else _isolated(tried, traits)
    except DloError:
        raise
    except FORWARD_FAILURES as error:
        raise DloError(
            f"model must be of a supported family, got {type(model).__name__}, which fails on a few tokens:"
            f" {first_line(error)}; choose, for example, llama or qwen3"
        ) from error
    finally:
        tried.train(was_training)


@torch.no_grad()
def probe_encoder_decoder(model: PreTrainedModel) -> Traits:
    """Returns the properties of an encoder-decoder model, tested on a few tokens.

    Args:
        model: Model with its weights, or on the meta device.
    """
    tried = small_copy(model) if next(model.parameters()).is_meta else model
    was_training = tried.training
    tried.eval()
    try:
        with torch.device(tried.device), default_dtype(None if tried is model else torch.float32):
            tokens = ordinary_tokens(tried)
            rows = torch.tensor([tokens, tokens[::-1]])
            inputs = {"input_ids": rows, "decoder_input_ids": rows[:, :4]}
            hidden = decoder_states(tried, **inputs)
            projects = _is_head_of(tried, hidden, language_models.logits(tried, **inputs))
            apart = projects and not is_flash(tried) and _segments_keep_apart(tried, rows)
            return Traits(isolates_documents=apart, positions_from_0=True, has_linear_head=projects)
    except FORWARD_FAILURES:  # such as a decoder that takes its inputs by other names
        return Traits(isolates_documents=False, positions_from_0=True, has_linear_head=False)
    finally:
        tried.train(was_training)


def _segments_keep_apart(model: PreTrainedModel, rows: Tensor) -> bool:
    """Returns whether segment ids keep pairs of packed rows apart, in both stacks and between them."""
    source, target = torch.tensor([[1, 1, 2, 2, 2, 0]] * 2), torch.tensor([[1, 2, 2, 0]] * 2)
    try:
        packed = decoder_states(model, rows, rows[:, :4], encoder_segment_ids=source, decoder_segment_ids=target)
        return near(packed[:, 1:3], decoder_states(model, rows[:, 2:5], rows[:, 1:3]))
    except FORWARD_FAILURES:  # such as LED's attention, whose mask has two dims
        return False


def ordinary_tokens(model: PreTrainedModel) -> list[int]:
    """Returns six tokens without special ones: some families do not count padding."""
    config = language_models.text_config(model.config)
    special = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    some = [number for number in range(min(16, language_models.model_vocabulary_size(config))) if number not in special]
    a, b, c, d = (some * 4)[:4]
    return [a, b, c, d, c, b]


def _check_causal(model: PreTrainedModel) -> None:
    """Raises DloError if the logits of the first tokens depend on the last ones."""
    tokens = ordinary_tokens(model)
    rows = torch.tensor([tokens, [*tokens[:4], tokens[0], tokens[0]]], device=model.device)
    first, other = language_models.logits(model, input_ids=rows)[:, :4].float()
    most = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps) ** 0.75  # Rounding only.
    if (first - other).abs().max() <= most * other.abs().max():
        return
    known = language_models.text_config(model.config).to_dict()
    fixes = {"is_decoder": True, "causal": True, "use_bidirectional_attention": False, "attn_type": "uni"}
    wrong = next((name for name, to in fixes.items() if known.get(name, to) != to), None)
    fix = wrong and f"set config.{wrong}: {str(fixes[wrong]).lower()}"
    raise DloError(
        f"model must be causal, got {type(model).__name__}, whose tokens attend to later ones;"
        f" {fix or 'choose a causal family, such as llama or qwen3'}"
    )


def _counts_from_0(model: PreTrainedModel) -> bool:
    tokens = torch.tensor([ordinary_tokens(model)], device=model.device)
    places = torch.arange(tokens.shape[1], device=model.device)[None]
    own = language_models.hidden_states(model, input_ids=tokens)
    return near(language_models.hidden_states(model, input_ids=tokens, position_ids=places), own)


def _projects(model: PreTrainedModel) -> bool:
    tokens = torch.tensor([ordinary_tokens(model)], device=model.device)
    hidden = language_models.hidden_states(model, input_ids=tokens)
    logits = language_models.logits(model, input_ids=tokens)
    return _is_head_of(model, hidden, logits)


def _is_head_of(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> bool:
    """Returns whether logits are the head's output for these hidden states."""
    head = language_models.find_head(model)
    if hidden.shape[-1] != getattr(head.module, "in_features", hidden.shape[-1]):
        return False
    made = head.logits(hidden).to(model.dtype)
    return made.shape == logits.shape and near(made, logits)


def _keeps_apart(model: PreTrainedModel, by_lengths: bool = False) -> bool:
    tokens = ordinary_tokens(model)
    rows = torch.tensor([tokens, tokens[::-1]], device=model.device)  # transformers treats one row differently.
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]] * 2, device=model.device)
    told: dict[str, Any] = {}
    if by_lengths:
        told = {"attention_mask": rows.new_empty((0, 0, 0, 0)), **flash_arguments(positions)}
    packed = language_models.hidden_states(model, input_ids=rows, position_ids=positions, **told)
    return near(packed[:, 2:], language_models.hidden_states(model, input_ids=rows[:, 2:]))


@default_dtype(torch.float32)
def _isolated(model: PreTrainedModel, traits: Traits) -> Traits:
    """Returns the traits of a model that ignores restarting positions, with the changes that keep documents apart."""
    try:
        twin = small_copy(model).eval()
        tokens = ordinary_tokens(twin)
        rows = torch.tensor([tokens, tokens[::-1]], device="cpu")
        positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]], device="cpu")
        parts = [[rows[0, :2], rows[0, 2:]], [rows[1, :3], rows[1, 3:]]]
        run = functools.partial(language_models.hidden_states, input_ids=rows)
        find_blocks = lambda model: language_models.find_blocks(model)[1]
        with torch.device("cpu"):
            alone = [
                torch.cat([language_models.hidden_states(twin, input_ids=part[None])[0] for part in row])
                for row in parts
            ]
            isolation = document_isolation.find_isolation(twin, positions, run, torch.stack(alone), find_blocks)
    except FORWARD_FAILURES:  # such as buffers that a family makes from values that the meta device does not have
        return traits
    if isolation is None:
        return traits
    positions_from_0 = traits.positions_from_0 and not isolation.gathers_positions
    return traits._replace(isolates_documents=True, positions_from_0=positions_from_0, isolation=isolation)


def _keeps_apart_by_lengths(twin: PreTrainedModel) -> bool:
    """Returns whether a twin passes document lengths to its attention, and keeps documents apart elsewhere."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_STAND_IN, _uncapped_attention)
    AttentionMaskInterface.register(_STAND_IN, sdpa_mask)
    twin.config._attn_implementation = _STAND_IN
    try:
        return _keeps_apart(twin, by_lengths=True)
    except (*FORWARD_FAILURES, DloError):  # such as a family without transformers' attention interface
        return False


def _uncapped_attention(*args: Any, softcap: float | None = None, **options: Any) -> Any:
    return packed_attention.attention_forward(*args, **options)


# --- the twin --------------------------------------------------------------------------------------------------


@default_dtype(torch.float32)
def small_copy(model: PreTrainedModel, window: int | None = None, attention: str | None = None) -> Any:
    """Returns a small copy of a model for tests: on the CPU, in single precision, with one block of each type.

    Args:
        model: Model to copy.
        window: Sliding window of the twin, where the model has one.
        attention: Attention implementation of transformers; by default the model's, or `eager` for flash kernels.
    """
    config = copy.deepcopy(model.config)
    text = language_models.text_config(config)
    if window is not None and text_settings(text).sliding_window is not None:
        text.sliding_window = window
    kind = attention or ("eager" if is_flash(model) else config._attn_implementation)
    with torch.device("meta"):
        twin: Any = _build_like(model, config, kind)
    _, blocks = language_models.find_blocks(twin)
    del blocks[_kinds_end(blocks, text_settings(config).layer_types) :]
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        for module in twin.modules():
            for name, fixed in _fixed_tensors(module):
                empty = torch.empty_like(fixed, device="cpu")
                setattr(module, name, nn.Parameter(empty, False) if isinstance(fixed, nn.Parameter) else empty)
        _fill_fixed(twin, twin)
        weights: dict[int, nn.Parameter] = {}  # Tied ones stay tied.
        for module in twin.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.requires_grad:
                    weights.setdefault(id(parameter), nn.Parameter(_thin(parameter.shape)))
                    setattr(module, name, weights[id(parameter)])
    twin.requires_grad_(False)
    if twin.config._experts_implementation:
        twin.set_experts_implementation("eager")  # Others need contiguous weights.
    return twin


def _build_like(model: PreTrainedModel, config: Any, attention: str) -> Any:
    """Returns a model of the same class; that of a sub-config (Emu3's text model) is unknown to transformers' lists."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is not None and isinstance(model, known):
        return language_models.build_model(None, config, dtype=torch.float32, attention=attention)
    return type(model)._from_config(config, dtype=torch.float32, attn_implementation=attention)


def _fixed_tensors(module: nn.Module, recurse: bool = False) -> list[tuple[str, Tensor]]:
    """Returns the names and tensors of what a model computes and does not train: buffers, and tables of sines."""
    frozen = [(name, p) for name, p in module.named_parameters(recurse=recurse) if not p.requires_grad]
    return [*module.named_buffers(recurse=recurse), *frozen]


def _fill_fixed(model: Any, owner: Any) -> None:
    """Initialises the modules with fixed tensors, each by the innermost model of transformers around it."""
    from transformers import PreTrainedModel

    for child in model.children():
        _fill_fixed(child, child if isinstance(child, PreTrainedModel) else owner)
    # A model fills the buffers of its blocks, such as FalconH1's multipliers.
    if _fixed_tensors(model, recurse=isinstance(model, PreTrainedModel)):
        owner._init_weights(model)


def _kinds_end(blocks: nn.ModuleList, layer_types: Sequence[str]) -> int:
    """Returns the smallest number of first blocks that include every type of block."""
    seen: list[Any] = []
    end = 0
    for number, block in enumerate(blocks):
        shapes = [(name, tuple(parameter.shape)) for name, parameter in block.named_parameters()]
        kind = (type(block), shapes, layer_types[number] if layer_types else None)
        if kind not in seen:
            seen.append(kind)
            end = number + 1
    return end


def _thin(shape: torch.Size) -> Tensor:
    """Returns a strided random tensor that repeats values: entry `[i, j, k]` is value `i + j + k`.

    A matrix then needs the memory of one row and one column, and still maps different inputs to different outputs.
    """
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    if len(shape) < 2:
        return torch.rand(shape, generator=generator) + 0.5
    values = torch.randn(sum(shape) - len(shape) + 1, generator=generator) / max(shape[-1], 1) ** 0.5
    return values.as_strided(shape, (1,) * len(shape))
