"""Recomputation: gradients and buffers are what they are without it, to the bit."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dlo_framework.models.recompute import recompute


class Counted(nn.Module):
    """Scales by a buffer that it has just changed, so that recomputation must begin from the value before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(1.5)
        return torch.tanh(self.linear(x)) * self.scale.clone()


class Replaced(Counted):
    """Puts another tensor in place of its buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 1.5
        return torch.tanh(self.linear(x)) * self.scale


def blocks(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "batch norm":
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3))
        )
    return nn.Sequential(*((Counted if kind == "changed" else Replaced)() for _ in range(3)))


def train(net: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    gradients = {f"{name}.grad": p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {**dict(net.state_dict()), **gradients}


@pytest.mark.parametrize("before", ["nothing", "a copy after a step", "a step whose buffers do not change"])
@pytest.mark.parametrize("kind", ["batch norm", "changed", "replaced"])
def test_buffers_change_once_and_gradients_are_the_same(kind: str, before: str) -> None:
    plain, recomputed = blocks(kind), blocks(kind)
    recompute(recomputed)
    if before != "nothing":
        for net in (plain, recomputed):
            train(net.train("copy" in before), 1)
    if "copy" in before:
        recomputed = copy.deepcopy(recomputed)
    expected, found = train(plain.train()), train(recomputed.train())
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
