"""What is written is what `sampling` says, whatever a model has in its own `generation_config`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from dlo_tasks.language import language_models
from dlo_tasks.language.generation import Sampling, complete_ids
from support.token_batches import FAMILIES

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "max_position_embeddings": 128, "eos_token_id": None}
IDS = torch.tensor([[5, 9, 33, 2, 7]])


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    model = language_models.build_model(
        None, language_models.read_config(None, LLAMA), dtype=torch.float32, attention=None
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that the likeliest token is not the last one again
    return model


def written(model: Any, **sampling: Any) -> Tensor:
    options = Sampling(**{"max_new_tokens": 12, **sampling})
    return complete_ids(model, IDS, torch.ones_like(IDS), options, None, False)


@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 5.0},
        {"suppress_tokens": list(range(0, 64, 2))},
        {"num_return_sequences": 2, "num_beams": 2},
        {"return_dict_in_generate": True},
        {"do_sample": True, "temperature": 5.0},
        {"max_length": 3},
    ],
    ids=lambda own: next(iter(own)),
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}], ids=["likeliest", "drawn"])
def test_a_models_own_settings_change_nothing(model: Any, own: dict[str, Any], sampling: dict[str, Any]) -> None:
    expected = written(model, **sampling)
    settings = model.generation_config = GenerationConfig(**own)
    assert torch.equal(written(model, **sampling), expected)
    assert model.generation_config is settings


def test_temperature_0_takes_the_likeliest_token(model: Any) -> None:
    model.generation_config = GenerationConfig(repetition_penalty=5.0)
    ids = IDS
    for _ in range(12):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert written(model).tolist() == ids[:, 5:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eager_attention_writes_the_same_behind_padding_that_is_longer_than_the_window(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = language_models.read_config(None, {"model_type": "gemma2", **FAMILIES["gemma2"], "initializer_range": 0.4})
    model = language_models.build_model(None, config, dtype=dtype, attention=None)
    options = Sampling(max_new_tokens=12, temperature=1.0, seed=2)
    padded, mask = torch.zeros(1, 20, dtype=torch.long), torch.zeros(1, 20, dtype=torch.long)
    padded[:, 15:], mask[:, 15:] = IDS, 1
    found = complete_ids(model, padded, mask, options, None, False)
    assert torch.equal(found, complete_ids(model, IDS, torch.ones_like(IDS), options, None, False))
