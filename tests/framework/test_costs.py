"""FLOPs of a Llama's step are the same whoever counts them, and however it runs."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import flex_attention

from dlo_framework.costs import FlopCounter, OperatorCounter
from dlo_plugins.parallel.pipeline.model_stages import flop_costs
from dlo_plugins.plan.model_profile import profile_model
from dlo_tasks.language.causal_lm import CausalLM

ROWS, LENGTH = 2, 16
LLAMA = {
    **{"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH},
}


@pytest.fixture(scope="module")
def task() -> CausalLM:
    found = CausalLM(config=LLAMA)
    found.configure_model()
    return found


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(96, (ROWS, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _counted(module: Any, step: Any) -> float:
    counter = FlopCounter()
    counter.count_first()
    counter.start(module, ((LENGTH,),))
    step().backward()
    counter.stop(ROWS)
    return counter.per_sample


def _step(task: CausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    args, kwargs = task.inputs(batch)
    return task.loss(task(*args, **kwargs), batch)


def test_a_llamas_step_counts_the_same_alone_with_our_loss_and_compiled(task: CausalLM, batch: Any) -> None:
    alone = _counted(nn.Module(), lambda: task.model(**batch).loss)
    products = sum(p.numel() for n, p in task.model.named_parameters() if p.ndim == 2 and "embed" not in n)
    attention = 2 * 2 * LENGTH * LENGTH * 32
    # Backward computes the scores again: five products for forward's two.
    assert alone == 6 * LENGTH * products + 2 * attention * (1 + 5 / 2)
    assert _counted(task, lambda: _step(task, batch)) == alone
    for block in task.model.model.layers:
        block.compile(backend="eager")
    assert _counted(task, lambda: _step(task, batch)) == alone


def test_the_balance_of_a_pipeline_and_a_plan_count_what_the_monitor_does(task: CausalLM, batch: Any) -> None:
    with OperatorCounter() as counter, torch.no_grad():
        task.model(batch["input_ids"])
    meta = CausalLM(config=LLAMA).on_meta()
    parts = flop_costs(meta.model, meta.parallel_plan(), lambda: meta.model(batch["input_ids"]))
    assert parts is not None
    assert parts.stem + sum(parts.blocks) + parts.head == counter.get_total_flops()
    profile = profile_model(meta, batch, meta.parallel_plan(), dtype=torch.float32, device="cpu")
    # A plan leaves out what the kernel does: the half of the scores that a causal mask hides.
    products = [item for part in profile.parts for work in (part.forward, part.backward) for item in work.products]
    found = sum(count * product.flops / product.fraction for product, count in products)
    assert found == pytest.approx(_counted(task, lambda: _step(task, batch)))


@pytest.mark.parametrize("make", [lambda attend: attend, functools.partial(torch.compile, backend="aot_eager")])
def test_a_users_flex_attention_runs_while_it_is_counted(make, monkeypatch):
    """torch (2.11 to 2.15) does not run it under a mode of operators, not even uncompiled."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    inputs = [torch.randn(1, 2, 128, 16, requires_grad=True) for _ in range(3)]
    with OperatorCounter() as counter:
        out = make(flex_attention)(*inputs)
        grads = torch.autograd.grad(out.sum(), inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), inputs))
    assert counter.get_total_flops() == 2 * 2 * 128 * 128 * (2 + 5) * 16


def test_an_operator_of_functions_without_a_formula_runs_and_has_no_mfu(caplog):
    def add(total, one):
        return total + one, total * one

    with OperatorCounter() as counter:
        total, _ = scan(add, torch.zeros(2), torch.ones(3, 2))
    assert total.tolist() == [3, 3]
    assert counter.refused
    assert "the FLOPs of scan are not known" in caplog.text
