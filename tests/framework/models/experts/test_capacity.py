"""Capacities of transformers' routers: dropped choices by a count by hand, and the results without them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.errors import DloError
from dlo_framework.models.experts import find_mixtures
from dlo_framework.models.experts.balance import describe_balance, limit_capacity, sum_loads, watch_loads
from support.causal_types import TYPES, tiny

ROWS, LENGTH, FACTOR = 2, 12, 0.75


def build(family: str, implementation: str | None = None) -> Any:
    torch.manual_seed(0)
    config = tiny(family, dropout=False)
    settings = AutoConfig.for_model(config.pop("model_type"), **config)
    more = {} if implementation is None else {"experts_implementation": implementation}
    return AutoModelForCausalLM.from_config(settings, **more).train()


def kept_by_hand(indices: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Which choices find a place: a row's first choices before its second ones, each in the order of the tokens."""
    kept = torch.zeros_like(indices, dtype=torch.bool)
    capacity = math.ceil(FACTOR * LENGTH * indices.shape[1] / experts)
    for row in range(ROWS):
        places = [0] * experts
        for choice in range(indices.shape[1]):
            for token in range(row * LENGTH, (row + 1) * LENGTH):
                at = int(weights[token].sort(descending=True, stable=True).indices[choice])
                expert = int(indices[token, at])
                kept[token, at] = places[expert] < capacity
                places[expert] += 1
    return kept


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_choices_beyond_the_capacity_of_a_row_add_nothing(family: str, implementation: str) -> None:
    model = build(family, implementation)
    mixture = find_mixtures(model)[-1]
    plain, limited = copy.deepcopy(model), model
    limit_capacity(limited, FACTOR)
    holder, twin = (found.get_submodule(mixture.name) for found in (limited, plain))
    assert mixture.router is not None
    router = mixture.router.removeprefix(f"{mixture.name}.")
    x = torch.randn(ROWS, LENGTH, 32)
    _, weights, indices = twin.get_submodule(router)(x.view(-1, 32))
    kept = kept_by_hand(indices, weights, 4)
    assert 0 < kept.sum() < kept.numel()

    def without_dropped(module: Any, args: Any, output: Any) -> Any:
        return (output[0], output[1] * kept, *output[2:])

    twin.get_submodule(router).register_forward_hook(without_dropped)
    loads, _ = watch_loads(limited)
    found, expected = (module(x) for module in (holder, twin))
    found, expected = (output[0] if isinstance(output, tuple) else output for output in (found, expected))
    torch.testing.assert_close(found, expected)
    for output in (found, expected):
        output.square().sum().backward()
    for one, other in zip(holder.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    balance = describe_balance(sum_loads(loads, None, torch.device("cpu"))[-1])
    assert balance is not None
    assert balance.dropped == pytest.approx(1 - float(kept.double().mean()))
    twin.get_submodule(router)._forward_hooks.clear()
    for output, other in zip(holder.eval()(x), twin.eval()(x), strict=True):  # Nothing is dropped in evaluation.
        torch.testing.assert_close(output, other)


def test_a_mixture_in_a_form_of_its_own_is_refused() -> None:
    for family in ("llama4_text", "jetmoe"):
        with pytest.raises(
            DloError, match=r"experts.capacity_factor must be unset for mixtures other than .* got 0.75"
        ):
            limit_capacity(build(family), FACTOR)
    model = build("mixtral")
    limit_capacity(model, FACTOR)
    with pytest.raises(DloError, match=r"not called with hidden states \[rows, tokens, features\], got \[4, 32\]"):
        model.get_submodule(find_mixtures(model)[0].name)(torch.randn(4, 32))


@pytest.mark.slow
def test_every_family_with_mixtures_drops_choices_or_is_refused() -> None:
    torch.manual_seed(0)
    refused, dropped = set(), set()
    for family in TYPES:
        config = tiny(family)
        settings = AutoConfig.for_model(config.pop("model_type"), **config)
        with torch.device("meta"):
            mixtures = find_mixtures(AutoModelForCausalLM.from_config(settings))
        if not mixtures:
            continue
        model = AutoModelForCausalLM.from_config(settings).train()
        try:
            limit_capacity(model, FACTOR)
            loads, _ = watch_loads(model)
            loss = model(input_ids=torch.randint(3, 60, (ROWS, LENGTH)), use_cache=False).logits.float().sum()
        except DloError:
            refused.add(family)
            continue
        loss.backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None), family
        found = [describe_balance(sums) for sums in sum_loads(loads, None, torch.device("cpu"))]
        assert any(balance is not None and balance.dropped > 0 for balance in found), family
        dropped.add(family)
    # Llama 4's experts get all tokens, and one choice of the router of ZAYA skips all of them.
    assert refused == {"llama4", "llama4_text", "zaya"}
    assert len(dropped) >= 50
