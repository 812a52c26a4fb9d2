"""Distillation over the vocabulary in chunks equals that over all logits, and so do its gradients."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from dlo_framework.distillation import agreements, logit_losses
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.vocab_parallel import VocabularyShard, set_shard
from dlo_framework.testing import run_distributed
from dlo_plugins.distill.student_losses import LogitDistance, LogitLossName
from dlo_tasks.language import vocabulary_distillation
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.vocabulary_distillation import summed_distillation
from dlo_tasks.language.vocabulary_head import VocabularyHead
from support.gathered_weights import free_until_called
from support.largest_tensor import Largest

WIDTH, WIDER, VOCABULARY, TOKENS = 16, 24, 50, 23
KL = LogitDistance("kl", 2.0)


def make(bias: bool = False, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor, Any, Tensor, Tensor]:
    """Returns projection and hidden states of a student and of a wider teacher, and targets."""
    torch.manual_seed(0)
    student, teacher = (nn.Linear(width, VOCABULARY, bias=bias, dtype=dtype) for width in (WIDTH, WIDER))
    hidden = (3 * torch.randn(TOKENS, WIDTH, dtype=dtype)).requires_grad_()
    theirs = 3 * torch.randn(TOKENS, WIDER, dtype=dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[::4] = IGNORE_INDEX
    return student, hidden, teacher, theirs, targets


def padded(teacher: nn.Linear, more: int = 14) -> nn.Linear:
    """Returns a teacher's projection with more tokens, which are probable."""
    found = nn.Linear(teacher.in_features, VOCABULARY + more, bias=teacher.bias is not None, dtype=torch.float64)
    with torch.no_grad():
        for name, value in teacher.named_parameters():
            found.get_parameter(name)[:VOCABULARY] = value
            found.get_parameter(name)[VOCABULARY:] = 3
    return found


def from_all_logits(
    student: VocabularyHead, hidden: Tensor, teacher: VocabularyHead, theirs: Tensor, targets: Tensor, loss: Any
) -> tuple[Tensor, Tensor]:
    keep = targets != IGNORE_INDEX
    ours, others = student.logits(hidden[keep]), teacher.logits(theirs[keep]).detach()
    return logit_losses(loss, ours, others).sum(), agreements(ours, others).sum()


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(3 * loss, tensors))


def assert_alike(found: Any, expected: Any, got: list[Tensor], wanted: list[Tensor]) -> None:
    """Asserts that losses, numbers of agreements and gradients are equal but for single precision."""
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=2e-6, atol=0)
    assert int(found[1]) == int(expected[1])
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("chunk", "scale", "kernel", "counted"),
    [
        *((1, 1.0, "columns", False), (5, 1.0, "columns", False), (100, 1.0, "columns", False)),
        *((5, 0.5, "columns", False), (5, 1.0, "rows", False), (5, 1.0, "rows", True)),
    ],
)
def test_chunks_equal_all_logits(
    chunk: int, scale: float, kernel: str, counted: bool, bias: bool, softcap: float | None, monkeypatch: Any
) -> None:
    """With `rows` as on an accelerator, where tokens without a target stay unless their number is known."""
    monkeypatch.setattr(vocabulary_distillation, "default_kernel", lambda device: kernel)
    projection, hidden, teacher, theirs, targets = make(bias)
    student, other = VocabularyHead(projection, scale, softcap), VocabularyHead(teacher, softcap=5.0)
    assert student.fuses == (scale == 1.0)
    count = int((targets != IGNORE_INDEX).sum()) if counted else None
    for loss in (KL, LogitDistance("jsd"), LogitDistance("wasserstein"), LogitDistance("mse")):
        given = student, hidden, other, theirs, targets, loss
        found, expected = summed_distillation(*given, chunk, count), from_all_logits(*given)
        assert_alike(
            found, expected, *(gradients(one[0], hidden, *projection.parameters()) for one in (found, expected))
        )


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("gathered", ["student", "teacher", "both"])
def test_a_gathered_head_is_called_once(gathered: str, scale: float) -> None:
    projection, hidden, teacher, theirs, targets = make()
    heads = VocabularyHead(projection, scale, 5.0), hidden, VocabularyHead(teacher), theirs, targets
    expected = from_all_logits(*heads, KL)
    wanted = gradients(expected[0], hidden, projection.weight)
    calls: list[int] = []
    for name, module in (("student", projection), ("teacher", teacher)):
        if gathered in (name, "both"):
            free_until_called(module, calls)
    with Largest() as largest:
        found = summed_distillation(*heads, KL, 5)
    # A weight, or hidden states; 5 tokens of logits.
    assert largest.elements <= max(VOCABULARY * WIDER, TOKENS * WIDER)
    assert len(calls) == (2 if gathered == "both" else 1)
    assert all("forward" not in module.__dict__ for module in (projection, teacher))
    assert_alike(found, expected, gradients(found[0], hidden, projection.weight), wanted)


def test_a_head_with_parts_of_its_own_is_called_with_all_tokens() -> None:
    """Their hooks, such as those around a LoRA adapter, gather when they are called."""
    projection, hidden, teacher, theirs, targets = make()
    calls: list[int] = []
    expected, expected_agreed = from_all_logits(
        VocabularyHead(projection), hidden, VocabularyHead(teacher), theirs, targets, KL
    )
    free_until_called(projection, calls)
    free_until_called(teacher, calls)
    heads = VocabularyHead(nn.Sequential(projection)), hidden, VocabularyHead(nn.Sequential(teacher)), theirs, targets
    found, agreed = summed_distillation(*heads, KL, 5)
    assert len(calls) == 2
    torch.testing.assert_close((found.double(), agreed), (expected.double(), expected_agreed.float()))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_of_a_larger_vocabulary_the_first_tokens_are_compared(scale: float) -> None:
    projection, hidden, teacher, theirs, targets = make(bias=True)
    student, other = VocabularyHead(projection, scale), VocabularyHead(teacher)
    expected, agreed = summed_distillation(student, hidden, other, theirs, targets, KL, 5)
    found = summed_distillation(student, hidden, VocabularyHead(padded(teacher)), theirs, targets, KL, 5)
    torch.testing.assert_close(found, (expected, agreed))


def test_without_targets_loss_and_gradients_are_zero() -> None:
    projection, hidden, teacher, theirs, targets = make()
    for scale in (1.0, 0.5):
        student = VocabularyHead(projection, scale)
        found, agreed = summed_distillation(
            student, hidden, VocabularyHead(teacher), theirs, targets.fill_(IGNORE_INDEX), KL
        )
        assert float(agreed) == 0
        assert float(gradients(found, hidden)[0].abs().sum()) == 0


def test_under_autocast_products_are_in_half_precision_and_sums_in_single() -> None:
    projection, hidden, teacher, theirs, targets = make(dtype=torch.float32)
    heads = VocabularyHead(projection), hidden, VocabularyHead(teacher), theirs, targets
    exact, _ = summed_distillation(*heads, KL)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = summed_distillation(*heads, KL)
    assert found.dtype == torch.float32
    assert 0 < abs(float((found - exact).detach())) < 0.02 * float(exact.detach())
    grads = gradients(found, hidden, projection.weight)
    assert all(grad.dtype == torch.float32 for grad in grads)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_logits_of_all_tokens_are_never_in_memory(scale: float, gathered: bool) -> None:
    torch.manual_seed(0)
    student, teacher = nn.Linear(8, 300, bias=False), nn.Linear(12, 300, bias=False)
    hidden, theirs = torch.randn(4000, 8, requires_grad=True), torch.randn(4000, 12)
    heads = VocabularyHead(student, scale), hidden, VocabularyHead(teacher), theirs, torch.randint(300, (4000,))
    for module in (student, teacher) if gathered else ():
        free_until_called(module, [])
    with Largest() as largest:
        summed_distillation(*heads, KL)[0].backward()
    assert largest.elements <= 256 * 300
    with Largest() as largest:
        from_all_logits(*heads, KL)[0].backward()
    assert largest.elements == 4000 * 300


class SplitLinear(nn.Linear):
    """Projection of a rank's slice of the vocabulary, called as tensor parallelism's."""

    def forward(self, hidden: Tensor, split: bool = False) -> Tensor:
        logits = super().forward(hidden)
        shard: Any = self.__dict__["vocabulary_shard"]
        return logits if split else shard.gather(logits)


def _split(linear: nn.Linear, rank: int, ranks: int, size: int = VOCABULARY) -> nn.Linear:
    first, last = (size * number // ranks for number in (rank, rank + 1))
    part = SplitLinear(linear.in_features, last - first, bias=linear.bias is not None, dtype=torch.float64)
    part.load_state_dict({name: value[first:last] for name, value in linear.state_dict().items()})
    set_shard(part, VocabularyShard(Communicator(), first, last - first, size))
    return part


#: Which projections are split, the scale of the logits, and the distance.
CASES = [(who, scale, KL) for who in ("both", "student", "teacher", "larger") for scale in (1.0, 0.5)]
CASES += [("both", 1.0, LogitDistance(name)) for name in get_args(LogitLossName) if name != "kl"]


def _on_ranks(rank: int, world_size: int) -> list[Any]:
    found = []
    for who, scale, distance in CASES:
        projection, hidden, teacher, theirs, targets = make(bias=True)
        ours = _split(projection, rank, world_size) if who != "teacher" else projection
        other = _split(teacher, rank, world_size) if who in ("both", "teacher") else teacher
        other = _split(padded(teacher), rank, world_size, VOCABULARY + 14) if who == "larger" else other
        heads = VocabularyHead(ours, scale, 2.0), hidden, VocabularyHead(other, softcap=5.0), theirs, targets
        loss, agreed = summed_distillation(*heads, distance, chunk=5)
        found.append((loss.detach(), agreed, *gradients(loss, hidden, ours.weight)))
    return found


def test_a_vocabulary_that_is_split_over_ranks_has_the_loss_and_gradients_of_one_process() -> None:
    for (who, scale, distance), one, two in zip(CASES, *run_distributed(_on_ranks, 2), strict=True):
        loss, agreed, of_hidden, of_weight = one
        projection, hidden, teacher, theirs, targets = make(bias=True)
        student, other = VocabularyHead(projection, scale, 2.0), VocabularyHead(teacher, softcap=5.0)
        expected = from_all_logits(student, hidden, other, theirs, targets, distance)
        whole = torch.cat([of_weight, two[3]]) if who != "teacher" else of_weight
        assert_alike((loss, agreed), expected, [of_hidden, whole], gradients(expected[0], hidden, projection.weight))
