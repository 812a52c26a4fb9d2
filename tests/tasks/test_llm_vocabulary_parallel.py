"""The loss over a vocabulary that is split over ranks is the loss over all of it, and so are its gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.testing import run_distributed
from dlo_plugins.tensor.division import local_range
from dlo_plugins.tensor.vocabulary import install_vocabulary
from dlo_tasks.llm.batches import IGNORE_INDEX
from dlo_tasks.llm.vocabulary_head import VocabularyHead
from dlo_tasks.llm.vocabulary_loss import Kernel, full_logits_loss, summed_loss, token_losses_and_hits

WIDTH, VOCABULARY, TOKENS = 16, 50, 23
CASES: list[dict[str, Any]] = [
    {},
    {"chunk": 5},
    {"chunk": 5, "bias": True, "softcap": 2.0},
    {"chunk": 5, "bias": True, "kernel": "rows"},  # what an accelerator computes, which keeps tokens without a target
    {"bias": True, "softcap": 2.0, "kernel": "rows"},
    {"chunk": 7, "scale": 0.25},  # no plain product: the module is called for each chunk
    {"hooked": True},  # a strategy gathers the weight when the module is called
]


def make(bias: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    projection = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[::4] = IGNORE_INDEX
    return projection, 3 * torch.randn(TOKENS, WIDTH), targets


def split(whole: nn.Linear, communicator: Communicator) -> nn.Linear:
    first, count = local_range(VOCABULARY, communicator.size, communicator.rank)
    part = nn.Linear(WIDTH, count, bias=whole.bias is not None)
    part.load_state_dict({name: tensor[first : first + count] for name, tensor in whole.state_dict().items()})
    install_vocabulary(part, VOCABULARY, communicator)
    return part


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def _losses(rank: int, world_size: int) -> None:
    communicator = Communicator()
    for case in CASES:
        _one_loss(communicator, **case)
    _measures(communicator)
    _whole_logits(communicator)
    _volume(communicator)


def _one_loss(
    communicator: Communicator,
    chunk: int | None = None,
    bias: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
    hooked: bool = False,
    kernel: Kernel | None = None,
) -> None:
    whole, hidden, targets = make(bias)
    part = split(whole, communicator)
    if hooked:
        part.register_forward_pre_hook(lambda module, args: None)
    first, count = local_range(VOCABULARY, communicator.size, communicator.rank)
    heads = VocabularyHead(whole, scale, softcap), VocabularyHead(part, scale, softcap)
    assert heads[1].fuses == (scale == 1.0 and not hooked)
    inputs = [hidden.clone().requires_grad_() for _ in heads]
    expected = full_logits_loss(heads[0], inputs[0], targets)
    found = summed_loss(heads[1], inputs[1], targets, chunk, kernel=kernel)
    close(found, expected)
    wanted = torch.autograd.grad(3 * expected, [inputs[0], *whole.parameters()])
    got = torch.autograd.grad(3 * found, [inputs[1], *part.parameters()])
    close(got[0], wanted[0])
    for one, other in zip(got[1:], wanted[1:], strict=True):
        close(one, other[first : first + count])


def _measures(communicator: Communicator) -> None:
    whole, hidden, targets = make(bias=False)
    with torch.no_grad():  # Some targets are hit, on each rank.
        hidden[1::2] = 5 * whole.weight[targets[1::2].clamp(min=0)]
    expected = token_losses_and_hits(VocabularyHead(whole), hidden, targets)
    found = token_losses_and_hits(VocabularyHead(split(whole, communicator)), hidden, targets)
    close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert 5 < int(found[1].sum()) < TOKENS


def _whole_logits(communicator: Communicator) -> None:
    """Called as any other module, as generation does, the head makes all logits; and gradients pass through them."""
    whole, hidden, targets = make(bias=True)
    part = split(whole, communicator)
    first, count = local_range(VOCABULARY, communicator.size, communicator.rank)
    inputs = [hidden.view(1, TOKENS, WIDTH).clone().requires_grad_() for _ in range(2)]
    expected, found = whole(inputs[0]), part(inputs[1])
    close(found, expected)
    wanted, got = (
        torch.autograd.grad(
            F.cross_entropy(logits[0], targets, ignore_index=IGNORE_INDEX), [given, *module.parameters()]
        )
        for module, logits, given in zip((whole, part), (expected, found), inputs, strict=True)
    )
    close(got[0], wanted[0])
    close(got[1], wanted[1][first : first + count])


def _volume(communicator: Communicator) -> None:
    """Whatever the chunks, the hidden states' gradient passes once, and no rank gathers logits."""
    whole, hidden, targets = make(bias=False)
    for scale in (1.0, 0.5):
        with communicator.counted() as passed:
            given = hidden.clone().requires_grad_()
            summed_loss(VocabularyHead(split(whole, communicator), scale), given, targets, 5).backward()
        assert passed == {"all_reduce": TOKENS * WIDTH}


def test_a_split_vocabulary_has_the_loss_of_the_whole() -> None:
    run_distributed(_losses, 2)


def test_a_vocabulary_that_the_ranks_do_not_divide() -> None:
    run_distributed(_losses, 3)
