"""Parameters that no text reaches: found on fake tensors, and frozen by `freeze: auto`."""

import pytest
import torch
from torch import nn

from dlo_framework.distributed.gradient_check import find_unused, unused_message
from dlo_framework.errors import DloError
from dlo_tasks.llm.causal_lm import CausalLM
from support.causal_types import tiny
from support.foreign_transformer import ForeignTask


def frozen(task: CausalLM) -> set[str]:
    task = task.on_meta()
    return {name for name, parameter in task.model.named_parameters() if not parameter.requires_grad}


def test_cross_attentions_of_bart_are_frozen() -> None:
    found = frozen(CausalLM(config=tiny("bart", dropout=False), freeze="auto"))
    assert found
    assert all(".encoder_attn" in name for name in found)
    assert "model.decoder.layers.0.encoder_attn.q_proj.weight" in found
    more = frozen(CausalLM(config=tiny("bart", dropout=False), freeze=["auto", "model.decoder.layers.0"]))
    assert {"model.decoder.layers.0.fc1.weight", "model.decoder.layers.1.encoder_attn.k_proj.bias"} <= more
    assert not frozen(CausalLM(config=tiny("llama", dropout=False), freeze="auto"))


def test_they_are_found_while_a_task_has_metrics() -> None:
    """A run makes metrics, whose states are no buffers, before it builds the model."""
    task = CausalLM(config=tiny("bart", dropout=False), freeze="auto")
    task.setup("fit")
    task.configure_model()
    assert not task.get_parameter("model.model.decoder.layers.0.encoder_attn.q_proj.weight").requires_grad


def test_the_error_offers_it() -> None:
    task = CausalLM(config=tiny("bart", dropout=False))
    assert "set --model.init_args.freeze auto, or set find_unused: true" in unused_message(["a"], module=task)
    told = CausalLM(config=tiny("bart", dropout=False), freeze="auto")
    assert "set requires_grad to False" in unused_message(["a"], module=told)
    assert "set requires_grad to False" in unused_message(["a"], module=nn.Linear(1, 1))


class Branching(ForeignTask):
    def loss(self, outputs: torch.Tensor, batch: object) -> torch.Tensor:
        return outputs[outputs > 0].sum()


def test_a_step_that_needs_values_is_an_error() -> None:
    task = ForeignTask().on_meta()
    assert find_unused(task, task.example_batch(None)) == []
    task = Branching().on_meta()
    with pytest.raises(DloError, match=r"must be found by a step on fake tensors, got .*; name them instead"):
        find_unused(task, task.example_batch(None))
