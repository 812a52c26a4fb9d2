"""What an optimizer needs to see is found by trying it."""

import pytest
import timm.optim
import torch
from torch import nn

from dlo_plugins.parallel.optimizer_probe import probe_optimizer


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5, 3))]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-3), "elementwise"),
        (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True), "elementwise"),
        (lambda p: timm.optim.Lion(p), "elementwise"),
        (lambda p: torch.optim.Muon(p), "tensor"),
        (lambda p: torch.optim.Adafactor(p), "tensor"),
        (lambda p: timm.optim.Lars(p, lr=0.1), "tensor"),
        (lambda p: timm.optim.Lamb(p, max_grad_norm=None), "tensor"),
        (lambda p: timm.optim.Lamb(p), "all"),
    ],
)
def test_known_optimizers(make, kind: str) -> None:
    assert probe_optimizer(make(parameters())) == kind


class LowRank(torch.optim.Optimizer):
    """Of GaLore's kind: the gradients of large matrices are projected on a few singular vectors."""

    def __init__(self, params: object, rank: int = 8) -> None:
        super().__init__(params, {"lr": 0.1, "rank": rank})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim == 2 and min(p.shape) > group["rank"]:
                    u = torch.linalg.svd(p.grad, full_matrices=False)[0][:, : group["rank"]]
                    p.grad = u @ (u.T @ p.grad)
                p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: timm.optim.create_optimizer_v2(p, "adafactorbv"),  # Factors from 16 rows and columns.
        lambda p: timm.optim.AdamP(p),  # Projects where gradient and weight are nearly orthogonal.
        lambda p: timm.optim.SGDP(p, lr=0.1),
        lambda p: LowRank(p),
    ],
)
def test_an_update_that_combines_elements_in_some_cases_only(make) -> None:
    assert probe_optimizer(make([nn.Parameter(torch.randn(24, 20)), nn.Parameter(torch.randn(20))])) == "tensor"
    large = nn.Parameter(torch.randn(2048, 1024, device="meta"))  # Of another pipeline stage.
    assert probe_optimizer(make([nn.Parameter(torch.randn(3)), large])) == "tensor"


def test_a_class_can_say_that_it_needs_full_tensors() -> None:
    class Later(torch.optim.SGD):
        needs_full_tensors = True

    assert probe_optimizer(Later(parameters(), lr=0.1)) == "tensor"


class Own(torch.optim.SGD):
    """A user's, with what it needs in attributes: they are read, and written to."""

    def __init__(self, params: object, whole: bool) -> None:
        super().__init__(params, lr=0.1)
        self.whole, self.seen, self.scale = whole, {"steps": 0}, torch.ones(())

    def step(self, closure: object = None) -> None:
        self.seen["steps"] += 1
        self.scale *= 0.5
        for group in self.param_groups:
            for p in group["params"]:
                p.grad *= self.scale / (p.grad.norm() if self.whole else 1)
        super().step()


@pytest.mark.parametrize(("whole", "kind"), [(True, "tensor"), (False, "elementwise")])
def test_an_optimizers_own_attributes_and_one_that_it_wraps(whole: bool, kind: str) -> None:
    own = Own(parameters(), whole)
    assert probe_optimizer(own) == kind
    assert (own.seen, float(own.scale)) == ({"steps": 0}, 1)
    around = timm.optim.Lookahead(own, alpha=0.5, k=2)
    assert probe_optimizer(around) == kind
    assert around.param_groups is own.param_groups
    assert (own.seen, own.param_groups[0]["lookahead_step"], dict(own.state)) == ({"steps": 0}, 0, {})


def test_nothing_of_the_optimizer_changes() -> None:
    held = parameters()
    before = [p.detach().clone() for p in held]
    optimizer = torch.optim.AdamW(held, lr=0.0)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert probe_optimizer(optimizer) == "elementwise"
    assert not optimizer.state
    assert not calls
    assert all(map(torch.equal, held, before))
    assert optimizer.param_groups[0]["lr"] == 0.0
