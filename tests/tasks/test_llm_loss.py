"""The loss over the vocabulary in chunks is the loss over all logits, and so are its gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_tasks.llm.vocabulary_loss import NO_TARGET, VocabularyHead, measure, summed_loss, whole_loss

WIDTH, VOCABULARY, TOKENS = 16, 50, 23


def make(bias: bool = False, dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    projection = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    hidden = (3 * torch.randn(TOKENS, WIDTH, dtype=dtype)).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[::4] = NO_TARGET
    return projection, hidden, targets


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(3 * loss, tensors))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
def test_chunks_are_the_whole(chunk: int, bias: bool, softcap: float | None) -> None:
    projection, hidden, targets = make(bias)
    head = VocabularyHead(projection, softcap=softcap)
    assert head.fuses
    expected, found = whole_loss(head, hidden, targets), summed_loss(head, hidden, targets, chunk)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0)
    wanted = gradients(expected, hidden, *projection.parameters())
    for one, other in zip(gradients(found, hidden, *projection.parameters()), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


class Adapted(nn.Module):
    """A projection with something beside it, as LoRA has."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.projection, self.beside = projection, nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden) + self.beside(hidden)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_head_that_is_no_plain_product_is_called_for_each_chunk(scale: float, softcap: float | None) -> None:
    projection, hidden, targets = make()
    adapted = Adapted(projection)
    head = VocabularyHead(adapted, scale, softcap)
    assert not head.fuses
    expected, found = whole_loss(head, hidden, targets), summed_loss(head, hidden, targets, 5)
    torch.testing.assert_close(found, expected)
    wanted = gradients(expected, hidden, *adapted.parameters())
    for one, other in zip(gradients(found, hidden, *adapted.parameters()), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_head_whose_weight_comes_with_the_call_is_called_once_and_never_read() -> None:
    projection, hidden, targets = make()
    weight = projection.weight.detach().clone()
    head, calls = VocabularyHead(projection), []
    expected = whole_loss(head, hidden, targets)
    measured = measure(head, hidden, targets)
    storage = projection.weight.untyped_storage()
    size = storage.nbytes()

    def gather(*_: object) -> None:
        calls.append(1)
        storage.resize_(size)
        projection.weight.data.copy_(weight)

    storage.resize_(0)
    assert head.is_gathered
    projection.register_forward_pre_hook(gather)
    found = summed_loss(head, hidden, targets, 5)
    storage.resize_(0)
    again = measure(head, hidden, targets)
    assert len(calls) == 2
    torch.testing.assert_close(found, expected)
    assert all(torch.equal(one, other) for one, other in zip(again, measured, strict=True))


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_what_is_frozen_has_no_gradient(frozen: str) -> None:
    projection, hidden, targets = make()
    (projection.weight if frozen == "weight" else hidden).requires_grad_(False)
    summed_loss(VocabularyHead(projection), hidden, targets).backward()
    assert (projection.weight.grad is None) == (frozen == "weight")
    assert (hidden.grad is None) == (frozen == "hidden")


def test_without_targets_the_loss_and_its_gradients_are_zero() -> None:
    projection, hidden, targets = make()
    for head in (VocabularyHead(projection), VocabularyHead(projection, scale=0.5)):
        loss = summed_loss(head, hidden, torch.full_like(targets, NO_TARGET))
        assert loss == 0
        (slope,) = torch.autograd.grad(loss, [hidden])
        assert not slope.any()


def test_logits_as_far_apart_as_single_precision_allows_have_finite_losses() -> None:
    projection = nn.Linear(1, 3, bias=False)
    projection.weight.data = torch.tensor([[-3e4], [0.0], [3e4]])
    hidden = torch.ones(3, 1, requires_grad=True)
    loss = summed_loss(VocabularyHead(projection), hidden, torch.tensor([0, 1, 2]))
    loss.backward()
    assert loss.item() == pytest.approx(9e4)
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_under_autocast_the_product_is_in_half_precision_and_the_sums_are_not() -> None:
    projection, hidden, targets = make(dtype=torch.float32)
    head = VocabularyHead(projection)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = summed_loss(head, hidden, targets, 5), whole_loss(head, hidden, targets)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)
    assert found.item() != whole_loss(head, hidden, targets).item()
    slopes = gradients(found, hidden, projection.weight)
    assert [slope.dtype for slope in slopes] == [torch.float32] * 2
    for one, other in zip(slopes, gradients(whole_loss(head, hidden, targets), hidden, projection.weight), strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


def test_half_precision_weights_add_up_in_single_precision() -> None:
    projection, hidden, targets = make(dtype=torch.bfloat16)
    many, goals = hidden.detach().repeat(40, 1), targets.repeat(40)
    summed_loss(VocabularyHead(projection), many, goals, 4).backward()
    exact = nn.Linear(WIDTH, VOCABULARY, bias=False)
    exact.weight.data = projection.weight.data.float()
    whole_loss(VocabularyHead(exact), many.float(), goals).backward()
    assert projection.weight.grad is not None
    assert exact.weight.grad is not None
    error = (projection.weight.grad.float() - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert error < 0.01


class Largest(TorchDispatchMode):
    """Notes the most elements that any tensor made in it has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_of_all_tokens_are_never_there() -> None:
    torch.manual_seed(0)
    projection, hidden = nn.Linear(8, 300, bias=False), torch.randn(4000, 8, requires_grad=True)
    targets = torch.randint(300, (4000,))
    for head in (VocabularyHead(projection), VocabularyHead(projection, scale=0.5)):
        with Largest() as largest:
            summed_loss(head, hidden, targets).backward()
        assert largest.elements <= 256 * 300
        with Largest() as largest:
            measure(head, hidden, targets)
        assert largest.elements <= 256 * 300
    with Largest() as largest:
        whole_loss(VocabularyHead(projection), hidden, targets).backward()
    assert largest.elements == 4000 * 300


def test_measures_are_each_tokens_own() -> None:
    projection, hidden, targets = make()
    losses, hits = measure(VocabularyHead(projection, softcap=2.0), hidden, targets)
    logits = 2 * torch.tanh(projection(hidden) / 2)
    expected = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, expected.float())
    assert hits.tolist() == ((logits.argmax(1) == targets) & (targets != NO_TARGET)).tolist()
    assert hits.any()


def test_a_second_backward_says_why_there_is_none() -> None:
    projection, hidden, targets = make()
    loss = summed_loss(VocabularyHead(projection), hidden, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward"):
        loss.backward()


def test_a_uniform_head_costs_the_logarithm_of_the_vocabulary() -> None:
    projection = nn.Linear(4, 7, bias=False)
    projection.weight.data.zero_()
    loss = summed_loss(VocabularyHead(projection), torch.randn(5, 4), torch.arange(5))
    assert loss.item() == pytest.approx(5 * math.log(7))
