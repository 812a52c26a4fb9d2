"""Losses and loads of routers: gradients against autograd's own, sums against counts by hand."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dlo_framework.errors import DloError
from dlo_framework.models.experts.auxiliary_loss import follow_gradient, in_micro_batch, set_scale
from dlo_framework.models.experts.balance import (
    check_routers,
    describe_balance,
    find_routers,
    sum_loads,
    watch_loads,
    watch_losses,
)
from dlo_framework.models.experts.layer import Experts, MixtureLayer
from dlo_framework.models.experts.mixture_options import MixtureOptions
from dlo_framework.models.experts.routers import expert_scores, load_balancing_loss, router_z_loss

CPU = torch.device("cpu")


def layer_of(**options: Any) -> MixtureLayer:
    torch.manual_seed(0)
    made = MixtureOptions(**{"count": 4, "aux_loss": 0.5, "z_loss": 0.1, **options})
    layer = MixtureLayer(8, Experts(4, 8, 6, torch.relu), made)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def explicit_loss(layer: MixtureLayer, x: torch.Tensor) -> torch.Tensor:
    logits, _, indices = layer.gate(x)
    counts = torch.stack([(indices == expert).sum() for expert in range(4)]).float()
    balance = load_balancing_loss(expert_scores(logits, layer.gate.kind), counts)
    return layer(x).square().mean() + 0.5 * balance + 0.1 * router_z_loss(logits)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_attached_losses_have_the_gradients_of_added_ones_at_any_scale(scale: float, recomputed: bool) -> None:
    layer, x = layer_of(capacity_factor=1.0), torch.randn(2, 9, 8)
    (explicit_loss(layer, x) * scale).backward()
    expected = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}  # type: ignore[union-attr]
    layer.zero_grad()
    _, handles = watch_losses(layer, MixtureOptions(aux_loss=0.5, z_loss=0.1), None)
    output = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
    (follow_gradient(output.square().mean()) * scale).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    for handle in handles:
        handle.remove()
    layer.zero_grad()
    layer(x).square().mean().backward()
    assert not torch.allclose(layer.gate.weight.grad, expected["gate.weight"] / scale)  # type: ignore[arg-type]


def gate_gradient_with_counts_so_far(layer: MixtureLayer, parts: list[torch.Tensor]) -> torch.Tensor:
    """Gradient of the router's weight, whose fractions are those of the micro-batches so far."""
    layer.zero_grad()
    total = torch.zeros(4)
    for x in parts:
        logits, _, indices = layer.gate(x)
        total = total + torch.stack([(indices == expert).sum() for expert in range(4)])
        balance = load_balancing_loss(expert_scores(logits, layer.gate.kind), total)
        (layer(x).square().mean() + 0.5 * balance).backward()
    assert layer.gate.weight.grad is not None
    return layer.gate.weight.grad.clone()


@pytest.mark.parametrize("recomputed", [False, True])
def test_fractions_are_of_the_micro_batches_of_the_step_so_far(recomputed: bool) -> None:
    layer, parts = layer_of(), [torch.randn(2, 9, 8, requires_grad=True) for _ in range(3)]
    expected = gate_gradient_with_counts_so_far(layer, parts)
    layer.zero_grad()
    set_scale(1.0)
    loads, handles = watch_losses(layer, MixtureOptions(aux_loss=0.5), None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)  # type: ignore[return-value]

    for _ in range(2):  # The second step begins with new counts.
        for x in parts:
            forward(x).square().mean().backward()
        torch.testing.assert_close(layer.gate.weight.grad, expected)
        layer.zero_grad()
        for load in loads:
            load.step.end_step()
    # A schedule runs all forwards before the first backward; each recomputation has the counts of its own forward.
    outputs = []
    for number, x in enumerate(parts):
        with in_micro_batch(number):
            outputs.append(forward(x))
    for load in loads:
        load.step.end_step()
    for number, output in enumerate(outputs):
        with in_micro_batch(number):
            output.square().mean().backward()
    torch.testing.assert_close(layer.gate.weight.grad, expected)
    for handle in handles:
        handle.remove()
    layer.zero_grad()
    one_by_one = sum(gate_gradient_with_counts_so_far(layer, [x]) for x in parts)
    assert not torch.allclose(one_by_one, expected)  # type: ignore[arg-type]


def test_a_forward_that_is_marked_as_repeated_counts_no_token_again() -> None:
    layer, x = layer_of(), torch.randn(2, 9, 8, requires_grad=True)
    loads, _ = watch_losses(layer, MixtureOptions(aux_loss=0.5, bias_rate=0.1), None)
    gradients = []
    for recomputes in (False, True):
        layer.zero_grad()
        with in_micro_batch("one", recomputes):
            layer(x).square().mean().backward()
        gradients.append(layer.gate.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    assert sum_loads(loads, None, CPU)[0][:4].sum() == 36


@pytest.mark.parametrize("recomputed", [False, True])
def test_loads_are_counted_once(recomputed: bool) -> None:
    layer, x = layer_of(capacity_factor=0.5), torch.randn(2, 9, 8, requires_grad=True)
    loads, _ = watch_loads(layer)
    for _ in range(2):
        output = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        output.sum().backward()
    logits, _, indices = layer.gate(x.detach())
    with torch.no_grad():
        layer(x)
    layer.eval()(x)
    (sums,) = sum_loads(loads, None, CPU)
    counts = torch.stack([(indices == expert).sum() for expert in range(4)]).double()
    # The call of the router alone was in training too.
    torch.testing.assert_close(sums[:4], 3 * counts)
    found = describe_balance(sums)
    assert found is not None
    torch.testing.assert_close(found.load, counts / counts.sum())
    assert found.dropped == pytest.approx(float((indices == 4).double().mean()))
    assert found.dropped > 0
    share = logits.softmax(1)
    entropy = -(share * share.log()).sum(1).mean() / torch.tensor(4.0).log()
    assert found.entropy == pytest.approx(float(entropy.detach()), rel=1e-5)
    assert found.peak == pytest.approx(float(counts.max() / counts.mean()))
    assert found.variation == pytest.approx(float(counts.std(correction=0) / counts.mean()))
    assert describe_balance(sum_loads(loads, None, CPU)[0]) is None


def test_a_model_without_routers_or_without_biases_is_refused() -> None:
    with pytest.raises(DloError, match="must have a mixture of experts, got Linear"):
        check_routers(nn.Linear(2, 2), MixtureOptions())
    with pytest.raises(DloError, match="bias_rate must be 0 for routers without e_score_correction_bias"):
        check_routers(layer_of(), MixtureOptions(bias_rate=0.1))
    assert list(find_routers(nn.ModuleDict({"a": layer_of(bias_rate=0.1)}))) == ["a.gate"]
