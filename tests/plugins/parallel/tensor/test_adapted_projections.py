"""Other adapters than LoRA and DoRA, whose parity is in `test_llm_adapters_ranks.py`, are refused."""

import pytest
import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_tasks.language import adapters
from dlo_tasks.language.adapters import Lora
from support.tensor_models import language_model, plan_of


def test_other_adapters_are_refused() -> None:
    model = language_model("llama")
    adapters.add_adapters(model, model.get_output_embeddings(), Lora(rank=3), torch.float32)
    model.model.layers[0].self_attn.q_proj.extra = nn.Linear(2, 2)  # type: ignore[index,union-attr,attr-defined]
    with pytest.raises(
        DloError, match=r"adapters of 'model.layers.0.self_attn.q_proj' must be LoRA or DoRA .* set tp=1"
    ):
        TensorParallel().check(model, plan_of(model), 2)
