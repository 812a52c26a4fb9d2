"""What a family of models does that is not known of it: tried on six tokens, before it trains.

A model without memory, or whose attention runs on an accelerator alone, is tried by a twin: its own blocks, as many as
there are kinds of them, with weights that lie in next to no memory and are as random as need be.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_tasks.llm import models, packed_attention
from dlo_tasks.llm.counted import begins_of, documents_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Families that are known to fit: their logits are their head's output, scaled and soft-capped as
#: :func:`dlo_tasks.llm.models.head_of` has it, and documents whose positions begin anew do not see each other. Others
#: are tried on a few tokens.
KNOWN = frozenset(
    {"cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite"}
    | {"llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"}
)
#: transformers' name for attention by :func:`_by_documents`. It is matched for "flash", as the kernels' names are.
_STAND_IN = "dlo_flash_stand_in"
#: What a forward raises that a model was not made for.
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


class Traits(NamedTuple):
    """What a model does with tokens.

    Attributes:
        packs: whether positions that begin anew keep documents in one row apart.
        counts_from_0: whether it takes `position_ids`, and its own are 0, 1, 2...; RoBERTa's begin after its padding
            token.
        projects: whether logits are the head's output, scaled and soft-capped, so that they can be made in chunks.
    """

    packs: bool
    counts_from_0: bool
    projects: bool


ORDINARY = Traits(packs=True, counts_from_0=True, projects=True)


def is_flash(model: PreTrainedModel) -> bool:
    """Returns whether attention is computed by one of the flash kernels, which know documents by their lengths alone.

    The name is asked as transformers asks it (`is_flash_attention_requested`, 5.17 to 5.23).
    """
    return "flash" in (model.config._attn_implementation or "")


def documents(model: PreTrainedModel, inputs: Mapping[str, Tensor], *, packs: bool) -> dict[str, Any]:
    """Returns what a model is told of the documents in its rows beside their positions, where its kernels know lengths.

    Args:
        model: that is called.
        inputs: `position_ids [B, L]`, if there are any, and `attention_mask` of padded rows.
        packs: whether positions that begin anew keep documents apart; see :func:`try_family`.

    Raises:
        DloError: for documents that would see each other.
    """
    positions = inputs.get("position_ids")
    if positions is None:
        return {}
    flash = is_flash(model)
    if not packs and documents_of(positions).begin_anew:
        other = ", or take attention: sdpa" if flash else ""
        raise DloError(
            f"{type(model).__name__} takes no account of positions that begin anew, so that documents packed into a row"
            f" would see each other; pad them instead, each in a row of its own{other}"
        )
    if "attention_mask" in inputs:
        return {}
    if packed_attention.is_packed_attention(model):
        return packed_attention.arguments(model, positions)
    return lengths_of_documents(positions) if flash else {}


def use_packed_attention(model: PreTrainedModel, device: torch.device) -> None:
    """Has a model that computes attention by `sdpa` keep packed documents apart without a mask, where that suits it.

    Families that are not known are tried beside their dense mask, on a twin with a window of two tokens.

    Args:
        model: Model that was built.
        device: Device of the run.
    """
    config = models.text_config(model.config)
    if model.config._attn_implementation != "sdpa" or not packed_attention.suits(config, device):
        return
    packed_attention.register()
    if model.config.model_type in KNOWN or matches_dense_mask(model):
        model.set_attn_implementation(packed_attention.NAME)


@torch.no_grad()
def matches_dense_mask(model: PreTrainedModel) -> bool:
    """Returns whether packed attention gives a model what a dense mask gives it: tried on a twin, of two rows."""
    packed_attention.register()
    try:
        twin = _twin(model, window=2, attention="sdpa")
        tokens = _tokens(twin)
        rows = torch.tensor([tokens, tokens[::-1]])
        positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
        twin.eval()
        expected = models.hidden_states(twin, input_ids=rows, position_ids=positions)
        twin.set_attn_implementation(packed_attention.NAME)
        told = packed_attention.arguments(twin, positions)
        found = models.hidden_states(twin, input_ids=rows, position_ids=positions, **told)
        return "cu_seq_lens_q" in told and _near(found, expected)
    except (*_FAILURES, DloError):  # such as a family whose attention asks no interface
        return False


def lengths_of_documents(position_ids: Tensor) -> dict[str, Any]:
    """Returns what tells flash attention the documents of packed rows; nothing where each row is one document.

    Its kernels take no mask. transformers (5.17 to 5.23) finds documents by their positions in a batch of one row only,
    and else lets all tokens of a row see each other; but it hands on the places where documents begin, as the kernels
    take them, with all rows behind each other.

    Args:
        position_ids: `[B, L]`; a document begins with each row, and wherever they do not go up by one.
    """
    number, longest, _ = documents_of(position_ids)
    if number == len(position_ids):
        return {}
    places = torch.nonzero_static(begins_of(position_ids).flatten(), size=number).flatten()
    edges = F.pad(places, (0, 1), value=position_ids.numel()).to(torch.int32)
    return {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}


@torch.no_grad()
def try_family(model: PreTrainedModel) -> Traits:
    """Tries a model of a family that is not known on a few tokens.

    Args:
        model: with its weights, or on the meta device.

    Raises:
        DloError: if a token sees those that follow it, which it is to predict; or if the model cannot be tried.
    """
    if model.config.model_type in KNOWN and not getattr(model.config, "use_bidirectional_attention", None):
        return ORDINARY
    flash = is_flash(model)
    tried = _twin(model) if flash or next(model.parameters()).is_meta else model
    was_training = tried.training
    tried.eval()
    try:
        with torch.device(tried.device):  # A model is built under the meta device, and tried where its weights are.
            _check_causal(tried)
            return Traits(
                packs=_keeps_apart_by_lengths(tried) if flash else _keeps_apart(tried),
                counts_from_0=_counts_from_0(tried),
                projects=_projects(tried),
            )
    except DloError:
        raise
    except _FAILURES as error:
        raise _unsupported(model, f"cannot be tried on a few tokens: {models.first_line(error)}") from error
    finally:
        tried.train(was_training)


def _tokens(model: PreTrainedModel) -> list[int]:
    """Returns six tokens that a text can have anywhere: padding is left out, which some families do not count."""
    config = models.text_config(model.config)
    special = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    some = [number for number in range(min(16, models.vocabulary_of(config))) if number not in special]
    a, b, c, d = (some * 4)[:4]
    return [a, b, c, d, c, b]


def _check_causal(model: PreTrainedModel) -> None:
    """Raises a DloError if the logits of the first tokens change with the last ones."""
    tokens = _tokens(model)
    rows = torch.tensor([tokens, [*tokens[:4], tokens[0], tokens[0]]], device=model.device)
    first, other = models.logits(model, input_ids=rows)[:, :4].float()
    most = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps) ** 0.75  # There is hardly any difference.
    if (first - other).abs().max() <= most * other.abs().max():
        return
    known = models.text_config(model.config).to_dict()
    fixes = {"is_decoder": True, "causal": True, "use_bidirectional_attention": False, "attn_type": "uni"}
    wrong = next((name for name, to in fixes.items() if known.get(name, to) != to), None)
    fix = wrong and f"set config.{wrong}: {str(fixes[wrong]).lower()}"
    raise DloError(
        f"a causal language model must predict each token from those before it, and {type(model).__name__} sees those"
        f" that follow; {fix or 'take a family that is causal, such as llama or qwen3'}"
    )


def _counts_from_0(model: PreTrainedModel) -> bool:
    tokens = torch.tensor([_tokens(model)], device=model.device)
    places = torch.arange(tokens.shape[1], device=model.device)[None]
    own = models.hidden_states(model, input_ids=tokens)
    return _near(models.hidden_states(model, input_ids=tokens, position_ids=places), own)


def _projects(model: PreTrainedModel) -> bool:
    tokens = torch.tensor([_tokens(model)], device=model.device)
    found = models.hidden_states(model, input_ids=tokens)
    logits = models.logits(model, input_ids=tokens)
    head = models.head_of(model)
    if found.shape[-1] != getattr(head.module, "in_features", found.shape[-1]):
        return False
    made = head.logits(found).to(model.dtype)
    return made.shape == logits.shape and _near(made, logits)


def _keeps_apart(model: PreTrainedModel, flash: bool = False) -> bool:
    tokens = _tokens(model)
    rows = torch.tensor([tokens, tokens[::-1]], device=model.device)  # two: flash kernels differ with one alone
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]] * 2, device=model.device)
    told = lengths_of_documents(positions) if flash else {}
    packed = models.hidden_states(model, input_ids=rows, position_ids=positions, **told)
    return _near(packed[:, 2:], models.hidden_states(model, input_ids=rows[:, 2:]))


def _keeps_apart_by_lengths(twin: PreTrainedModel) -> bool:
    """Returns whether a twin hands its attention the lengths of documents, and keeps them apart elsewhere too."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(_STAND_IN, _by_documents)
    AttentionMaskInterface.register(_STAND_IN, flash_attention_mask)
    twin.config._attn_implementation = _STAND_IN
    try:
        return _keeps_apart(twin, flash=True)
    except _FAILURES:  # such as attention of the family's own, which asks no interface
        return False


def _unsupported(model: PreTrainedModel, why: str) -> DloError:
    return DloError(f"{type(model).__name__} {why}; it is not supported: take a family that is, such as llama or qwen3")


def _near(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors agree to half the digits of their dtype, at most of float32.

    Models in double precision compute norms, softmax and soft-caps in float32 all the same.
    """
    eps = max(torch.finfo(one.dtype).eps, torch.finfo(torch.float32).eps)
    return bool((one.double() - other.double()).abs().max() <= eps**0.5 * float(other.abs().max()))


# --- the twin --------------------------------------------------------------------------------------------------


def _twin(model: PreTrainedModel, window: int | None = None, attention: str | None = None) -> Any:
    """Returns a model to try in place of one that cannot be: on the CPU, in single precision.

    Args:
        model: Model that is not tried itself.
        window: Sliding window of the twin, where the model has one.
        attention: transformers' implementation; by default the model's, or `eager` for flash kernels.
    """
    config = copy.deepcopy(model.config)
    text = models.text_config(config)
    if window is not None and getattr(text, "sliding_window", None) is not None:
        text.sliding_window = window
    kind = attention or ("eager" if is_flash(model) else config._attn_implementation)
    with torch.device("meta"):
        twin: Any = models.build(None, config, dtype=torch.float32, attention=kind)
    _, blocks = models.blocks_of(twin)
    del blocks[_kinds_end(blocks, getattr(config, "layer_types", None)) :]
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        for module in twin.modules():
            if next(module.buffers(recurse=False), None) is not None:
                module.to_empty(device="cpu", recurse=False)
                twin._init_weights(module)
        for module in twin.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(_thin(parameter.shape), requires_grad=False))
    twin.tie_weights()
    if getattr(twin.config, "_experts_implementation", None):
        twin.set_experts_implementation("eager")  # Others want weights that lie in memory one by one.
    return twin


def _kinds_end(blocks: nn.ModuleList, layer_types: list[str] | None) -> int:
    """Returns how many of a model's first blocks have all the kinds of them."""
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
    """Returns random values of a shape, each of which stands at many places: `[i, j, k]` is the `i + j + k`-th of them.

    So a matrix needs the memory of a row and a column, and takes each input to another output all the same.
    """
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    if len(shape) < 2:
        return torch.rand(shape, generator=generator) + 0.5
    values = torch.randn(sum(shape) - len(shape) + 1, generator=generator) / max(shape[-1], 1) ** 0.5
    return values.as_strided(shape, (1,) * len(shape))


def _by_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention as flash kernels do that are told where documents begin, `[B, H, L, D]`, anywhere."""
    rows, _, length, _ = query.shape
    edges = torch.arange(0, (rows + 1) * length, length) if cu_seq_lens_q is None else cu_seq_lens_q
    document = torch.bucketize(torch.arange(rows * length), edges.long(), right=True).view(rows, 1, length)
    seen = (document[..., None] == document[..., None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    out = F.scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None
