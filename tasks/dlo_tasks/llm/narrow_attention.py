"""Language models with fewer heads than their width holds, in families whose configs have no width of a head.

In GPT-2, OPT and GPT-NeoX the heads' widths add up to the model's, so that transformers cannot describe a model without
some of its heads. Here a config of these families may have `head_dim`: the model is built with all heads that fit, and
its attention is then replaced by one with the first of them. The result needs dlo: transformers ignores `head_dim`.

A reach into transformers (5.24): the names of the projections and of the attributes that count heads are those of its
attention modules.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Projections of a family's attention: those that compute heads, each with its number of equal parts, and the one that
#: reads them. GPT-NeoX's fused projection has a head's queries, keys and values side by side: one part of width 3.
_PROJECTIONS: dict[str, tuple[dict[str, int], str, int]] = {
    "gpt2": ({"c_attn": 3}, "c_proj", 1),
    "opt": ({"q_proj": 1, "k_proj": 1, "v_proj": 1}, "out_proj", 1),
    "gpt_neox": ({"query_key_value": 1}, "dense", 3),
}
#: Families whose models are built here where their config has `head_dim`.
FAMILIES = tuple(_PROJECTIONS)


def is_narrow(config: PretrainedConfig) -> bool:
    """Returns whether a config has a width of a head, of a family whose transformers config has none."""
    return config.model_type in FAMILIES and getattr(config, "head_dim", None) is not None


def narrow_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Returns transformers' class of a model, which builds it with the heads of a config that has `head_dim`.

    Raises:
        DloError: The width is not a multiple of the head's, or has less than the heads.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    full_config(config)
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def __init__(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, full_config(config), *args, **kwargs)
        narrow_attention(self, config)

    # Its name is in the folders that it writes.
    return type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})


def full_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the model with all heads that fit into its width.

    Raises:
        DloError: The width is not a multiple of the head's, or has less than the heads.
    """
    full = copy.deepcopy(config)
    width, head = int(config.hidden_size), int(config.head_dim)
    if width % head or config.num_attention_heads > width // head:
        raise DloError(
            f"config.head_dim must divide the width of {config.model_type} into at least its"
            f" {config.num_attention_heads} heads, got {head} of {width}; leave it out, or set"
            f" {width // config.num_attention_heads}"
        )
    full.num_attention_heads = width // head
    return full


def narrow_attention(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Keeps the first heads of each attention of a model that has been built by :func:`full_config`.

    Args:
        model: Model, changed in place.
        config: Config with the number of heads to keep.
    """
    heads, width = int(config.num_attention_heads), int(config.head_dim)
    writers, reader, per_head = _PROJECTIONS[config.model_type]
    for attention in [module for module in model.modules() if hasattr(module, reader) and _has(module, writers)]:
        for name, parts in writers.items():
            _keep(attention.get_submodule(name), heads * width * per_head, parts, of_outputs=True)
        _keep(attention.get_submodule(reader), heads * width, 1, of_outputs=False)
        for key, value in (("num_heads", heads), ("split_size", heads * width)):
            if isinstance(getattr(attention, key, None), int):
                setattr(attention, key, value)
    model.config.num_attention_heads = heads


def _has(module: nn.Module, names: Any) -> bool:
    return all(hasattr(module, name) for name in names)


@torch.no_grad()
def _keep(layer: nn.Module, features: int, parts: int, *, of_outputs: bool) -> None:
    """Keeps the first features of each part of a layer's outputs or inputs."""
    transposed = hasattr(layer, "nf")  # transformers' Conv1D, whose weight is [in, out]
    weight: Any = layer.weight
    layer.weight = _first(weight, 1 if of_outputs == transposed else 0, features, parts)
    if of_outputs and isinstance(layer.bias, Tensor):
        layer.bias = _first(layer.bias, 0, features, parts)
    count = features * parts
    names = ("nf", "out_features") if of_outputs else ("nx", "in_features")
    setattr(layer, names[0] if transposed else names[1], count)


def _first(tensor: Any, dim: int, features: int, parts: int) -> nn.Parameter:
    kept = torch.cat([part.narrow(dim, 0, features) for part in tensor.chunk(parts, dim)], dim)
    return nn.Parameter(kept.contiguous(), requires_grad=tensor.requires_grad)
