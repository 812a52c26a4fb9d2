"""Models with low-rank adapters that are cut over 2 ranks have the loss, gradients and steps of the whole one."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_tasks.language import adapters
from dlo_tasks.language.adapters import Lora
from support.tensor_models import compare, language_model, plan_of, text_loss

#: Families whose projections have biases, fused queries, keys and values, a transposed weight, one key/value head.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi": {"attention_dropout": 0.0},
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 8, "attn_pdrop": 0.0, "tie_word_embeddings": True},
    "gemma": {"tie_word_embeddings": True, "num_key_value_heads": 1},
}


def adapted(family: str, **lora: Any) -> nn.Module:
    """Returns a model in double precision whose adapters have values already."""
    model = language_model(family, **FAMILIES[family])
    adapters.add_adapters(model, model.get_output_embeddings(), Lora(rank=3, **lora), torch.float32)
    model.double()
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.3)
    return model


#: Whether adapters are DoRA's, and whether sequences are divided: what is tried each time, and the rest.
SOME, OTHERS = ((False, True), (True, False)), ((False, False), (True, True))


def _cut(rank: int, world_size: int, families: tuple[str, ...], ways: tuple[tuple[bool, bool], ...]) -> None:
    for family in families:
        for dora, sequence_parallel in ways:
            make = functools.partial(adapted, family, dora=dora)
            compare(make, text_loss, sequence_parallel, f"{family}, dora {dora}, sequence {sequence_parallel}")
    some = functools.partial(adapted, "llama", targets=["q_proj", "down_proj", "lm_head"])
    compare(some, text_loss, False, "some projections and the head")


@pytest.mark.parametrize(
    ("families", "ways"),
    [
        (("llama", "gpt2"), SOME),
        pytest.param(("llama", "gpt2"), OTHERS, marks=pytest.mark.slow),
        pytest.param(("phi", "phi3", "gemma"), (*SOME, *OTHERS), marks=pytest.mark.slow),
    ],
)
def test_adapters_of_cut_projections_are_those_of_the_whole_model(families: tuple[str, ...], ways: Any) -> None:
    run_distributed(_cut, 2, families, ways)


def test_other_adapters_are_refused() -> None:
    model = adapted("llama")
    model.model.layers[0].self_attn.q_proj.extra = nn.Linear(2, 2)  # type: ignore[index,union-attr,attr-defined]
    with pytest.raises(
        DloError, match=r"adapters of 'model.layers.0.self_attn.q_proj' must be LoRA or DoRA .* set tp=1"
    ):
        TensorParallel().check(model, plan_of(model), 2)
