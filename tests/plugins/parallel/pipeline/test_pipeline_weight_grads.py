"""Backward in two parts, in one process: exact, complete only after the second, and without a trace when not asked."""

import copy
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlo_plugins.parallel.pipeline.weight_grads import WeightGradients


class Net(nn.Module):
    """Each kind of layer that can be put off, some that cannot, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.image = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.grouped = nn.Conv2d(8, 8, 3, groups=4, bias=False, dilation=2, padding=2)
        self.same = nn.Conv2d(8, 8, 3, padding="same")
        self.line = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.dense, self.bare = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.transposed = Conv1D(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.same(self.grouped(torch.tanh(self.image(x))))
        x = self.norm(self.line(x.flatten(2)).transpose(1, 2))
        x = torch.tanh(self.dense(x)) + self.bare(x)
        return self.last(self.transposed(self.dense(x)))


PUT_OFF = {"image", "grouped", "line", "dense", "bare", "transposed", "last"}
MODES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda net, x: net(x),
    "recomputed": lambda net, x: checkpoint(net, x, use_reentrant=False),
}


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_weight_gradients_come_later_and_are_the_same(mode: str, autocast: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    store = WeightGradients()
    assert store.install(net) == len(PUT_OFF)
    assert store.install(net) == 0  # Once.
    ones = [torch.randn(2, 3, 8, 8, requires_grad=True) for _ in range(3)]
    others = [x.detach().clone().requires_grad_() for x in ones]
    waiting: list[deque[Callable[[], None]]] = []
    for x in ones:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = MODES[mode](net, x).square().sum()
        before = gradients(net).keys()
        store.deferred = deque()
        loss.backward()
        waiting.append(store.deferred)
        store.deferred = None
        assert {name.split(".")[0] for name in gradients(net).keys() - before}.isdisjoint(PUT_OFF)
    assert {name.split(".")[0] for name in gradients(net)} == {"norm", "same"}
    for deferred in waiting:
        while deferred:
            deferred.popleft()()
    for x in others:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = MODES[mode](reference, x).square().sum()
        loss.backward()
    found, expected = gradients(net), gradients(reference)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        # Autocast adds the gradients of a layer's two uses up in bfloat16.
        tight = 5e-3 if autocast and name.startswith("dense") else 1e-5
        assert (gradient - expected[name]).abs().max() <= tight * expected[name].abs().max(), name
    for x, other in zip(ones, others, strict=True):
        torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_frozen_weights_and_inputs_get_none_and_hooks_run() -> None:
    net = Net()
    net.dense.weight.requires_grad_(False)
    net.bare.requires_grad_(False)
    called: list[str] = []
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))  # type: ignore[misc]
    store = WeightGradients()
    store.install(net)
    store.deferred = deque()
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    deferred, store.deferred = store.deferred, None
    while deferred:
        deferred.popleft()()
    expected = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert gradients(net).keys() == expected == set(called)
