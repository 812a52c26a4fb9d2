"""Attention under a mask of :mod:`dlo_framework.models.attention`, behind transformers' attention interface.

Written for transformers 5 (5.17 to 5.24). In a step, no mask of L x L exists: attention modules get the documents of
each row, int64 `[B, 1, 1, L]`, which transformers passes on because of its four dims. In generation, with a cache of
keys, they get transformers' causal mask, bool `[B, 1, q, k]`, and compute the same pattern under a dense mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from dlo_framework.batches import ROW_PLACES
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensor
from dlo_framework.models.attention import Attention, AttentionMask, DenseSparsity, KernelChoice
from dlo_framework.models.attention.attention_mask import bind_mask, find_heads, find_mask
from dlo_framework.models.attention.attention_options import Kernel, choose_kernel, log_choice
from dlo_framework.models.attention.masked_attention import Scores, cached_attention, masked_attention
from dlo_framework.models.autocast import autocast_dtype
from dlo_framework.models.hugging_face import attention_implementation
from dlo_tasks.language import packed_attention
from dlo_tasks.language.batches import IGNORE_INDEX, count_documents, mark_document_starts
from dlo_tasks.language.generation import max_positions
from dlo_tasks.language.language_models import text_config
from dlo_tasks.language.language_plans import plan_for
from dlo_tasks.language.text_settings import text_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Name of this implementation in transformers, which searches names for "sdpa" and "flash": it contains neither.
NAME = "dlo_masked"
#: Attribute in which an attention module keeps the name of its kernel.
_KERNEL = "_dlo_attention_kernel"
#: Positions up to which the layouts of all lengths are first blocks of one layout.
_LONGEST = 2**14
#: Kernels that transformers or `dlo_varlen` compute, by their names there.
_OTHERS = {"varlen": packed_attention.NAME, "sdpa": "sdpa", "eager": "eager"}


def read_option(option: Attention | str | Mapping[str, Any] | None) -> Attention | str | None:
    """Returns the option `attention:` of a task; a kernel's name becomes an :class:`Attention`.

    Args:
        option: Value of the config, or the plain data of a checkpoint.
    """
    if isinstance(option, Mapping):
        return Attention.from_settings(option)
    if isinstance(option, str) and option in get_args(KernelChoice) and option not in _OTHERS:
        return Attention(option)  # type: ignore[arg-type]
    return option


def base_implementation(option: Attention | str | None) -> str | None:
    """Returns the name in transformers with which a model is built, before :func:`install`; None for the default."""
    if option is None or isinstance(option, str):
        return option
    return _OTHERS.get(option.kernel) if option.mask is None else None


def is_default(option: Attention | str | None) -> bool:
    """Returns whether the option leaves kernel and mask to the model and the device."""
    return option is None or (isinstance(option, Attention) and option.kernel == "auto" and option.mask is None)


def is_masked(model: PreTrainedModel) -> bool:
    """Returns whether a model uses this implementation."""
    return bool(model.config._attn_implementation == NAME)


def install(
    model: PreTrainedModel, option: Attention | str | None, device: torch.device | None, *, causal: bool = True
) -> Kernel | None:
    """Makes a model compute the mask of the option, and returns the kernel; None where it keeps its own attention.

    Args:
        model: Model; it may be on the meta device.
        option: Option of the task.
        device: Device of the run; None if the model will not run, so that no kernel is chosen.
        causal: Whether tokens see earlier ones alone.

    Raises:
        DloError: If the model's attention cannot be replaced, or the kernel does not run on the device.
    """
    if not isinstance(option, Attention) or (option.mask is None and option.kernel in ("auto", *_OTHERS)):
        return None
    config = text_config(model.config)
    _check_config(model, config)
    pattern = option.mask or DenseSparsity()
    positions = max_positions(model.config)
    longest = None if positions is None else min(positions, _LONGEST)
    mask = AttentionMask(pattern, causal=causal, num_heads=config.num_attention_heads, longest=longest)
    kernel = Kernel("blocks", "any kernel has its shapes")
    if device is not None:
        dtype = packed_attention.dtype_of(model, device)
        dropout = packed_attention.has_dropout(config)
        has_sinks = any(getattr(part, "sinks", None) is not None for part in model.modules())
        plain = not text_settings(config).attn_logit_softcapping and not has_sinks
        kernel = choose_kernel(option.kernel, mask, device, dtype, dropout=dropout, plain_scores=plain)
    names = plan_for(model).attention_names(model)
    _register()
    model.set_attn_implementation(NAME)
    for name in names:
        for module in _modules_of(model, name):
            bind_mask(module, mask)
            module.__dict__[_KERNEL] = kernel.name
    if not names:
        raise DloError(
            f"attention.mask must have the names of the attention modules, got none from {type(model).__name__};"
            " choose a family with transformers' attention interface, such as llama"
        )
    return kernel


def log_kernel(
    model: PreTrainedModel, option: Attention | str | None, kernel: Kernel | None, length: int | None
) -> None:
    """Logs what computes the attention of a model, and why.

    Args:
        model: Model.
        option: Option of the task.
        kernel: Result of :func:`install`.
        length: Positions of the data's windows, if known.
    """
    if kernel is not None:
        mask = next(own_mask for module in model.modules() if (own_mask := find_mask(module)) is not None)
        log_choice(kernel, mask, length)
        return
    name = str(model.config._attn_implementation)
    if option is not None and base_implementation(option) is not None:
        reason = "the config sets it"
    elif name == packed_attention.NAME:
        reason = "it keeps packed documents apart without a dense mask on CUDA"
    elif name == "sdpa":
        reason = "torch's scaled_dot_product_attention has a fused kernel on every device"
    else:
        reason = "the family's attention has parts that fused kernels do not compute"
    log_choice(Kernel(name, reason), None)


def mask_arguments(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns keyword arguments that pass the documents and the padding of rows to the attention modules.

    Args:
        inputs: Inputs of the model: `input_ids [B, L]`, optional `position_ids [B, L]`, and `attention_mask [B, L]` of
            padded rows.
    """
    positions, padding = inputs.get("position_ids"), inputs.get("attention_mask")
    tokens = inputs["input_ids"]
    none = tokens.new_empty((0, 0, 0, 0))
    if padding is not None:
        numbers = padding.long() - 1  # 0 for tokens, -1 for padding
    elif positions is None or isinstance(positions, FakeTensor) or count_documents(positions).number == len(positions):
        return {"attention_mask": none}
    else:
        numbers = torch.zeros_like(tokens)
    if positions is not None:
        starts = mark_document_starts(positions)
        if padding is not None:
            starts = starts & (positions == 0)  # Positions of padding do not increase.
        numbers = torch.where(numbers < 0, numbers, starts.cumsum(1))
    return {"attention_mask": numbers[:, None, None]}


def targets(option: Attention | str | None, batch: Mapping[str, Any]) -> Tensor:
    """Returns a batch's labels without those that the model sees: the tokens of a prefix, of which each sees all.

    Args:
        option: Option of the task.
        batch: Batch with `labels`, `[B, L]`, the id of the next token; where ranks share the sequence, with the places
            of their tokens too.
    """
    labels: Tensor = batch["labels"]
    prefix = option.mask.prefix if isinstance(option, Attention) and option.mask is not None else 0
    if prefix < 2:
        return labels
    places = batch.get(ROW_PLACES)
    if places is None:
        places = torch.arange(labels.shape[1], device=labels.device)
    return labels.masked_fill(places < prefix - 1, IGNORE_INDEX)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention, with the signature of transformers' attention functions.

    Args:
        module: Attention module.
        query: Queries, `[B, H, q, D]`.
        key: Keys, `[B, K, k, D]`.
        value: Values, `[B, K, k, E]`.
        attention_mask: Documents, int64 `[B, 1, 1, L]`, empty for one per row; or a causal mask, bool `[B, 1, q, k]`.
        dropout: Dropout rate of attention weights.
        scaling: Factor of scores; the width's inverse square root by default.
        softcap: Soft bound of scores (Gemma 2).
        s_aux: Score of each head's sink, `[H]` (gpt_oss).
        **others: Further arguments of some families.

    Returns:
        Output, `[B, q, H, E]`, and None for the attention weights.

    Raises:
        DloError: If the module has no mask, or an argument is not supported.
    """
    mask = find_mask(module)
    if mask is None:
        raise DloError(
            f"attention.mask must be bound to each attention module, got none in {type(module).__name__}, which the"
            " model's plan does not name; choose a family with one kind of attention"
        )
    if others.get("position_bias") is not None:
        raise DloError(
            f"attention.mask must be without a bias of positions, got {type(module).__name__}; remove the mask"
        )
    scores = Scores(softcap, s_aux)
    dtype = autocast_dtype(value.device.type) or value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    heads = find_heads(module)
    is_step = attention_mask is not None and attention_mask.dtype == torch.int64
    if is_step:
        assert attention_mask is not None
        documents = None if attention_mask.numel() == 0 else attention_mask[:, 0, 0]
        out = masked_attention(
            module.__dict__[_KERNEL],
            query,
            key,
            value,
            mask,
            documents,
            heads=heads,
            scale=scaling,
            dropout=dropout,
            scores=scores,
        )
    else:
        out = cached_attention(query, key, value, mask, attention_mask, heads=heads, scale=scaling, scores=scores)
    return out.transpose(1, 2).contiguous(), None


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def causal_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, causal_mask)


def _check_config(model: PreTrainedModel, config: Any) -> None:
    kind = type(model).__name__
    settings = text_settings(config)
    window, layers = settings.sliding_window, sorted({*settings.layer_types} - {"full_attention"})
    if config.is_encoder_decoder:
        raise DloError(
            f"attention.mask must be for a model of one stack, got the encoder-decoder {kind}; remove the mask"
        )
    if layers:
        raise DloError(
            f"attention.mask must be for layers of full attention, got {', '.join(layers)} in {kind}; set"
            " config.layer_types to full_attention for all layers, or remove the mask"
        )
    slides = settings.use_sliding_window and not settings.layer_types
    if isinstance(window, int) and slides and window < (max_positions(model.config) or window + 1):
        raise DloError(
            f"attention.mask must be the only window, got config.sliding_window={window} of {kind} too; set"
            " config.sliding_window: null"
        )


def _modules_of(model: PreTrainedModel, name: str) -> list[nn.Module]:
    """Returns the modules of an attention that use the interface: itself, or one inside, beside BERT's projection."""
    part = model.get_submodule(name)
    modules = [module for module in part.modules() if attention_implementation(module) == NAME]
    if not modules:
        raise DloError(
            f"attention '{name}' of {type(model).__name__} must use transformers' AttentionInterface for"
            f" attention.mask, got {type(part).__name__}, which does not; choose a family that does: llama, qwen3,"
            " gpt_neox, bert..."
        )
    return modules
