"""The loss over the vocabulary in chunks is that of all logits, and so are its gradients, in each kernel, on ranks.

Z-loss, label smoothing and soft-capping are their formulas.
"""

from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.distillation import agreements, logit_losses
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.vocab_parallel import set_shard
from dlo_framework.errors import DloError
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.token_loss import TokenLoss
from dlo_plugins.distill.student_losses import LogitDistance, LogitLossName
from dlo_plugins.parallel.tensor.installation import install_vocabulary
from dlo_plugins.parallel.tensor.tp_plan import local_range
from dlo_tasks.language import vocabulary_distillation, vocabulary_loss
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling, SoftcappedLogits, complete_ids
from dlo_tasks.language.vocabulary_distillation import summed_distillation
from dlo_tasks.language.vocabulary_head import VocabularyHead
from dlo_tasks.language.vocabulary_loss import summed_loss, token_losses_and_hits
from support.gathered_weights import free_until_called
from support.largest_tensor import Largest
from support.strategies import STRATEGIES
from support.token_batches import FAMILIES, Tokens

WIDTH, VOCABULARY, TOKENS = 16, 50, 23
TERMS = [TokenLoss(z_loss=0.03), TokenLoss(label_smoothing=0.2), TokenLoss(0.03, 0.2), TokenLoss()]


def make(bias: bool = False, dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    projection = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    hidden = (3 * torch.randn(TOKENS, WIDTH, dtype=dtype)).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[::4] = IGNORE_INDEX
    return projection, hidden, targets


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(3 * loss, tensors))


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("some", [True, False])
def test_a_head_whose_weight_comes_with_the_call_is_called_once(some: bool, scale: float) -> None:
    projection, hidden, targets = make()
    if not some:
        targets.fill_(IGNORE_INDEX)
    head, calls = VocabularyHead(projection, scale, 2.0), []
    expected = head.losses(hidden, targets)
    wanted = gradients(expected, hidden, projection.weight)
    measured = token_losses_and_hits(head, hidden, targets)
    free_until_called(projection, calls)
    assert head.is_gathered
    assert head.fuses == (scale == 1.0)
    found = summed_loss(head, hidden, targets, 5)
    assert len(calls) == 1
    for one, other in zip(gradients(found, hidden, projection.weight), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    projection.weight.untyped_storage().resize_(0)
    again = token_losses_and_hits(head, hidden, targets)
    assert len(calls) == 2
    assert "forward" not in projection.__dict__
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0)
    assert torch.equal(again[1], measured[1])
    torch.testing.assert_close(again[0], measured[0])


def test_a_hook_of_the_users_gets_the_logits() -> None:
    projection, hidden, targets = make()
    shapes: list[torch.Size] = []
    projection.register_forward_hook(lambda module, args, logits: shapes.append(logits.shape))
    expected = F.cross_entropy(projection(hidden), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    torch.testing.assert_close(summed_loss(VocabularyHead(projection), hidden, targets), expected)
    assert shapes == [(TOKENS, VOCABULARY), (17, VOCABULARY)]  # those with a target


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
        loss = summed_loss(head, hidden, torch.full_like(targets, IGNORE_INDEX))
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
        found, expected = summed_loss(head, hidden, targets, 5), head.losses(hidden, targets)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)
    assert found.item() != head.losses(hidden, targets).item()
    slopes = gradients(found, hidden, projection.weight)
    assert [slope.dtype for slope in slopes] == [torch.float32] * 2
    for one, other in zip(slopes, gradients(head.losses(hidden, targets), hidden, projection.weight), strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


def test_logits_of_all_tokens_are_never_there() -> None:
    torch.manual_seed(0)
    projection, hidden = nn.Linear(8, 300, bias=False), torch.randn(4000, 8, requires_grad=True)
    targets = torch.randint(300, (4000,))
    for head in (VocabularyHead(projection), VocabularyHead(projection, scale=0.5)):
        with Largest() as largest:
            summed_loss(head, hidden, targets).backward()
        assert largest.elements <= 256 * 300
        with Largest() as largest:
            token_losses_and_hits(head, hidden, targets)
        assert largest.elements <= 256 * 300
    with Largest() as largest:
        VocabularyHead(projection).losses(hidden, targets).backward()
    assert largest.elements == 4000 * 300
    free_until_called(projection, [])
    with Largest() as largest:
        summed_loss(VocabularyHead(projection), hidden, targets).backward()
        projection.weight.untyped_storage().resize_(0)
        token_losses_and_hits(VocabularyHead(projection), hidden, targets)
    assert largest.elements <= 256 * 300


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_measures_are_each_tokens_own(dtype: torch.dtype, default_dtype: None) -> None:
    projection, hidden, targets = make(dtype=dtype)
    targets[1] = projection(hidden)[1].argmax()
    losses, hits = token_losses_and_hits(VocabularyHead(projection, softcap=2.0), hidden, targets)
    logits = projection(hidden).to(torch.promote_types(dtype, torch.float32))
    logits = 2 * torch.tanh(logits / 2)
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, reduction="none"))
    assert hits.tolist() == ((logits.argmax(1) == targets) & (targets != IGNORE_INDEX)).tolist()
    assert hits.any()


def test_a_second_backward_says_why_there_is_none() -> None:
    projection, hidden, targets = make()
    loss = summed_loss(VocabularyHead(projection), hidden, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward of the loss over the vocabulary must run once"):
        loss.backward()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for an accelerator runs as it is written."""
    monkeypatch.setattr(vocabulary_loss, "_compiled", lambda function: function)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kernel", ["columns", "rows", "compiled"])
def test_half_precision_is_summed_in_single_whatever_the_default_dtype(kernel: Any, default_dtype: None) -> None:
    projection, hidden, targets = make(dtype=torch.bfloat16)
    many, goals, terms = hidden.detach().repeat(40, 1), targets.repeat(40), TokenLoss(0.03, 0.2)
    exact = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float32)
    exact.weight.data = projection.weight.data.float()
    VocabularyHead(exact).losses(many.float(), goals, terms).backward()
    expected = by_definition(nn.Identity(), projection(many).double(), goals, terms, None)
    found = summed_loss(VocabularyHead(projection), many, goals, 8, kernel=kernel, terms=terms)
    found.backward()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)
    assert projection.weight.grad is not None
    assert exact.weight.grad is not None
    error = (projection.weight.grad.float() - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert error < 0.01


class Counts(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


#: Operations for which a host waits for an accelerator, and those whose backward sorts.
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "index"}


@pytest.mark.parametrize("counted", [True, False])
def test_an_accelerator_is_never_waited_for(counted: bool) -> None:
    projection, hidden, targets = make(dtype=torch.bfloat16)
    count = int((targets != IGNORE_INDEX).sum()) if counted else None
    with Counts() as found:
        summed_loss(VocabularyHead(projection), hidden, targets, 8, count, "rows").backward()
    assert not WAITS & set(found.names)
    assert not {"sort", "index_put", "index_put_", "_index_put_impl_"} & set(found.names)
    assert ("nonzero_static" in found.names) == counted


def test_chunks_of_an_accelerator_are_cut_by_a_budget_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vocabulary_loss.chunk_tokens(131_072, 2048, "rows") == 2048
    assert vocabulary_loss.chunk_tokens(131_072, 8192, "rows") == 2048
    assert vocabulary_loss.chunk_tokens(131_072, 2049, "rows") == 1025  # two alike, rather than one long and one short
    assert vocabulary_loss.chunk_tokens(131_072, 8192, "columns") == 256
    monkeypatch.setattr(vocabulary_loss, "ACCELERATOR_LOGITS", 10 * VOCABULARY)
    projection, hidden, targets = make()
    with Counts() as found:
        summed_loss(VocabularyHead(projection), hidden, targets, kernel="rows")
    assert found.names.count("_log_softmax") == 3  # of 23 tokens


def test_an_accelerator_has_rows_and_adds_to_a_weights_gradient_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = [vocabulary_loss.default_kernel(torch.device(name)) for name in ("cpu", "cuda", "mps")]
    assert kernels == ["columns", "rows", "rows"]
    projection, hidden, targets = make(dtype=torch.bfloat16)
    summed_loss(VocabularyHead(projection), hidden, targets, 8, kernel="rows").backward()
    expected, projection.weight.grad = projection.weight.grad, None
    plain, widths = torch.addmm, []

    def addmm(total: Tensor, one: Tensor, other: Tensor, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        """As on CUDA: a CPU has no such product."""
        widths.append((one.dtype, other.dtype, total.dtype, out_dtype))
        return plain(total, one.to(out_dtype), other.to(out_dtype), out=out)

    monkeypatch.setattr(vocabulary_loss, "_adds_wide", lambda device_type, dtype: True)
    monkeypatch.setattr(torch, "addmm", addmm)
    summed_loss(VocabularyHead(projection), hidden, targets, 8, kernel="rows").backward()
    half = torch.bfloat16
    assert widths == [(half, half, torch.float32, torch.float32)] * 3  # of 23 tokens
    torch.testing.assert_close(projection.weight.grad, expected, rtol=2e-2, atol=1e-2)


def test_a_kernel_that_does_not_serve_a_head_is_refused() -> None:
    projection, hidden, targets = make()
    with pytest.raises(DloError, match="loss_kernel must be torch where the output projection is adapted or scaled"):
        summed_loss(VocabularyHead(projection, scale=0.5), hidden, targets, kernel="compiled")
    projection.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(DloError, match="has hooks or an output_dtype"):
        summed_loss(VocabularyHead(projection), hidden, targets, kernel="compiled")
    fake = FakeTensorMode().from_tensor(hidden)  # As in the check of a mesh.
    with pytest.raises(DloError, match="has hooks or an output_dtype"):
        summed_loss(VocabularyHead(projection), fake, targets, kernel="compiled")
    split = make()[0]
    set_shard(split, mock.Mock())
    with pytest.raises(DloError, match=r"split over ranks \(tp\), whose sums Liger's kernel lacks"):
        summed_loss(VocabularyHead(split), hidden, targets, kernel="liger")


def test_ligers_kernel_needs_its_package_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DloError, match=r"pip install 'dlo_framework\[gpu\]'"):
        vocabulary_loss.check_kernel("liger")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    vocabulary_loss.check_kernel("liger")
    vocabulary_loss.check_kernel("liger", torch.device("cuda"))
    with pytest.raises(DloError, match="on a CPU, got liger"):
        vocabulary_loss.check_kernel("liger", torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize("terms", TERMS[2:], ids=str)
def test_the_compiled_kernel_is_the_loss(terms: TokenLoss) -> None:
    projection, hidden, targets = make(dtype=torch.float32)
    head = VocabularyHead(projection, softcap=2.0)
    expected = head.losses(hidden, targets, terms)
    found = summed_loss(head, hidden, targets, 8, kernel="compiled", terms=terms)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    wanted = gradients(expected, hidden, projection.weight)
    for one, other in zip(gradients(found, hidden, projection.weight), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


# --- the terms of the loss ---------------------------------------------------------------------------------------


def gathered(projection: nn.Linear) -> None:
    """Makes a projection look like one of DeepSpeed's stage 3, which gathers in hooks."""
    projection.register_forward_pre_hook(lambda module, args: None)
    for number, parameter in enumerate(projection.parameters()):
        parameter.ds_id = number  # type: ignore[attr-defined]


def by_definition(
    projection: nn.Module, hidden: Tensor, targets: Tensor, terms: TokenLoss, softcap: float | None, scale: float = 1.0
) -> Tensor:
    """The sum over tokens, from probabilities as written in the papers."""
    logits = scale * projection(hidden[targets != IGNORE_INDEX])
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    smooth = torch.full_like(logits, terms.label_smoothing / VOCABULARY)
    wanted = smooth + (1 - terms.label_smoothing) * F.one_hot(targets[targets != IGNORE_INDEX], VOCABULARY).double()
    total = logits.exp().sum(dim=1)
    return -(wanted * (logits.exp() / total[:, None]).log()).sum() + terms.z_loss * total.log().square().sum()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("kernel", ["columns", "rows", "compiled", "gathered", "gathered, compiled", "scaled"])
def test_a_kernel_is_the_formula_in_float64(kernel: Any, terms: TokenLoss, softcap: float | None) -> None:
    projection, hidden, targets = make(bias=True)
    head = VocabularyHead(projection, 0.5 if kernel == "scaled" else 1.0, softcap)
    expected = by_definition(projection, hidden, targets, terms, softcap, head.scale)
    wanted = torch.autograd.grad(3 * expected, [hidden, *projection.parameters()])
    chosen = kernel.split(", ")[-1] if kernel not in ("gathered", "scaled") else None
    if kernel.startswith("gathered"):
        gathered(projection)
    count = int((targets != IGNORE_INDEX).sum())
    for chunk, counted in ((1, None), (5, None), (100, None), (None, count)):
        found = summed_loss(head, hidden, targets, chunk, counted, kernel=chosen, terms=terms)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        got = torch.autograd.grad(3 * found, [hidden, *projection.parameters()])
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def split(whole: nn.Linear, communicator: Communicator) -> nn.Linear:
    first, count = local_range(whole.out_features, communicator.size, communicator.rank)
    part = nn.Linear(whole.in_features, count, dtype=torch.float64)
    part.load_state_dict({name: tensor[first : first + count] for name, tensor in whole.state_dict().items()})
    install_vocabulary(part, whole.out_features, communicator)
    return part


def _split(rank: int, world_size: int) -> None:
    communicator = Communicator()
    vocabulary_loss._compiled = lambda function: function
    for terms in TERMS:
        for softcap, scale, hooked, kernel in (
            (None, 1.0, False, "columns"),
            (2.0, 1.0, False, "columns"),
            (2.0, 1.0, False, "rows"),
            (2.0, 1.0, False, "compiled"),
            (None, 1.0, True, "compiled"),
            (2.0, 0.5, False, None),
            (None, 1.0, True, None),
        ):
            whole, hidden, targets = make(bias=True)
            first, count = local_range(VOCABULARY, world_size, rank)
            part = split(whole, communicator)
            if hooked:
                gathered(part)
            expected = by_definition(whole, hidden, targets, terms, softcap, scale)
            wanted = torch.autograd.grad(3 * expected, [hidden, *whole.parameters()])
            given = hidden.detach().clone().requires_grad_()
            head = VocabularyHead(part, scale, softcap)
            found = summed_loss(head, given, targets, 5, kernel=kernel, terms=terms)  # type: ignore[arg-type]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            got = torch.autograd.grad(3 * found, [given, *part.parameters()])
            torch.testing.assert_close(got[0], wanted[0], rtol=1e-11, atol=1e-12)
            for one, other in zip(got[1:], wanted[1:], strict=True):
                torch.testing.assert_close(one, other[first : first + count], rtol=1e-11, atol=1e-12)
    _measures(communicator)
    _whole_logits(communicator)
    _volume(communicator)


def _measures(communicator: Communicator) -> None:
    whole, hidden, targets = make(bias=True)
    with torch.no_grad():  # Some targets are hit, on each rank.
        hidden[1::2] = 5 * whole.weight[targets[1::2].clamp(min=0)]
    expected = token_losses_and_hits(VocabularyHead(whole), hidden, targets)
    found = token_losses_and_hits(VocabularyHead(split(whole, communicator)), hidden, targets)
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert 5 < int(found[1].sum()) < TOKENS


def _whole_logits(communicator: Communicator) -> None:
    """Called as any other module, as generation does, the head makes all logits; and gradients pass through them."""
    whole, hidden, targets = make(bias=True)
    part = split(whole, communicator)
    first, count = local_range(VOCABULARY, communicator.size, communicator.rank)
    inputs = [hidden.view(1, TOKENS, WIDTH).clone().requires_grad_() for _ in range(2)]
    expected, found = whole(inputs[0]), part(inputs[1])
    torch.testing.assert_close(found, expected)
    wanted, got = (
        torch.autograd.grad(
            F.cross_entropy(logits[0], targets, ignore_index=IGNORE_INDEX), [given, *module.parameters()]
        )
        for module, logits, given in zip((whole, part), (expected, found), inputs, strict=True)
    )
    torch.testing.assert_close(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1][first : first + count])


def _volume(communicator: Communicator) -> None:
    """Whatever the chunks, the hidden states' gradient passes once, and no rank gathers logits."""
    whole, hidden, targets = make(bias=True)
    for scale in (1.0, 0.5):
        with communicator.counted() as passed:
            given = hidden.clone().requires_grad_()
            summed_loss(VocabularyHead(split(whole, communicator), scale), given, targets, 5).backward()
        assert passed == {"all_reduce": TOKENS * WIDTH}


def test_a_vocabulary_that_ranks_share_has_the_formula_in_float64() -> None:
    """Three ranks do not divide it."""
    run_distributed(_split, 3)


def build(family: str = "llama", **options: Any) -> tuple[CausalLM, Tokens]:
    config = {"model_type": family, **FAMILIES[family]}
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, "z_loss": 1e-2, "label_smoothing": 0.1}
    return CausalLM(config=config, **more, **options), Tokens(1)


def test_training_is_that_of_one_process_under_tp_and_pp() -> None:
    """The composition of options and strategies has the others."""
    given = {"logit_softcap": 3.0}, {"precision": "64-true"}
    cases = [Case(STRATEGIES[axis], *given, axis) for axis in ("tp", "pp")]
    assert_parity(build, cases, steps=3, rtol=1e-7)  # A pipeline reports losses in single precision.


def test_metrics_are_of_the_cross_entropy_alone_and_of_the_bounded_logits() -> None:
    task, _ = build(logit_softcap=2.0)
    task.configure_model()
    batch = {
        "input_ids": torch.arange(8)[None],
        "labels": torch.arange(1, 9)[None],
        "position_ids": torch.arange(8)[None],
    }
    hidden = 30 * task(**task.inputs(batch)[1])
    assert task.head.softcap == 2.0
    losses, _ = token_losses_and_hits(task.head, hidden.flatten(0, 1), batch["labels"].flatten())
    logits = 2 * torch.tanh(task.head.module(hidden) / 2)
    torch.testing.assert_close(losses, F.cross_entropy(logits[0], batch["labels"][0], reduction="none"))
    smoothed = F.cross_entropy(logits[0], batch["labels"][0], label_smoothing=0.1)
    expected = smoothed + 1e-2 * torch.logsumexp(logits[0], dim=1).square().mean()
    torch.testing.assert_close(task.loss(hidden, batch), expected)


def test_generation_samples_from_the_bounded_logits() -> None:
    scores = torch.tensor([[0.0, 100.0]])
    assert SoftcappedLogits(2.0)(torch.zeros(1, 1), scores).tolist() == [[0.0, 2.0]]
    task, _ = build(logit_softcap=0.01)  # nearly uniform
    task.configure_model()
    with torch.no_grad():
        task.model.lm_head.weight.mul_(1000)  # type: ignore[union-attr, operator]
    written = {}
    for softcap in (0.01, None):
        ids = torch.arange(4)[None]
        asked: Any = (task.model, ids, torch.ones_like(ids), Sampling(40, 1.0), None, False)
        written[softcap] = complete_ids(*asked, softcap=softcap)
    assert len(written[0.01].unique()) > len(written[None].unique())


# --- distillation over the vocabulary in chunks equals that over all logits, and so do its gradients ----------------


WIDER = 24
KL = LogitDistance("kl", 2.0)


def make_pair(bias: bool = False, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor, Any, Tensor, Tensor]:
    """Returns projection and hidden states of a student and of a wider teacher, and targets."""
    student, hidden, targets = make(bias, dtype)
    teacher = nn.Linear(WIDER, VOCABULARY, bias=bias, dtype=dtype)
    return student, hidden, teacher, 3 * torch.randn(TOKENS, WIDER, dtype=dtype), targets


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
    projection, hidden, teacher, theirs, targets = make_pair(bias)
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
    projection, hidden, teacher, theirs, targets = make_pair()
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
    projection, hidden, teacher, theirs, targets = make_pair()
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
    projection, hidden, teacher, theirs, targets = make_pair(bias=True)
    student, other = VocabularyHead(projection, scale), VocabularyHead(teacher)
    expected, agreed = summed_distillation(student, hidden, other, theirs, targets, KL, 5)
    found = summed_distillation(student, hidden, VocabularyHead(padded(teacher)), theirs, targets, KL, 5)
    torch.testing.assert_close(found, (expected, agreed))


def test_without_targets_loss_and_gradients_are_zero() -> None:
    projection, hidden, teacher, theirs, targets = make_pair()
    for scale in (1.0, 0.5):
        student = VocabularyHead(projection, scale)
        found, agreed = summed_distillation(
            student, hidden, VocabularyHead(teacher), theirs, targets.fill_(IGNORE_INDEX), KL
        )
        assert float(agreed) == 0
        assert float(gradients(found, hidden)[0].abs().sum()) == 0


def test_under_autocast_products_are_in_half_precision_and_sums_in_single() -> None:
    projection, hidden, teacher, theirs, targets = make_pair(dtype=torch.float32)
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


#: Which projections are split, the scale of the logits, and the distance.
CASES = [(who, scale, KL) for who in ("both", "student", "teacher", "larger") for scale in (1.0, 0.5)]
CASES += [("both", 1.0, LogitDistance(name)) for name in get_args(LogitLossName) if name != "kl"]


def _on_ranks(rank: int, world_size: int) -> list[Any]:
    found, communicator = [], Communicator()
    for who, scale, distance in CASES:
        projection, hidden, teacher, theirs, targets = make_pair(bias=True)
        ours = split(projection, communicator) if who != "teacher" else projection
        other = split(teacher, communicator) if who in ("both", "teacher") else teacher
        other = split(padded(teacher), communicator) if who == "larger" else other
        heads = VocabularyHead(ours, scale, 2.0), hidden, VocabularyHead(other, softcap=5.0), theirs, targets
        loss, agreed = summed_distillation(*heads, distance, chunk=5)
        found.append((loss.detach(), agreed, *gradients(loss, hidden, ours.weight)))
    return found


def test_a_vocabulary_that_is_split_over_ranks_has_the_loss_and_gradients_of_one_process() -> None:
    for (who, scale, distance), one, two in zip(CASES, *run_distributed(_on_ranks, 2), strict=True):
        loss, agreed, of_hidden, of_weight = one
        projection, hidden, teacher, theirs, targets = make_pair(bias=True)
        student, other = VocabularyHead(projection, scale, 2.0), VocabularyHead(teacher, softcap=5.0)
        expected = from_all_logits(student, hidden, other, theirs, targets, distance)
        whole = torch.cat([of_weight, two[3]]) if who != "teacher" else of_weight
        assert_alike((loss, agreed), expected, [of_hidden, whole], gradients(expected[0], hidden, projection.weight))
