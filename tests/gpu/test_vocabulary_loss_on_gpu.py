"""The loss over a vocabulary on a GPU: each kernel is the plain loss, and none but Liger's waits."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlo_framework.token_loss import PLAIN, TokenLoss
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.vocabulary_head import VocabularyHead
from dlo_tasks.language.vocabulary_loss import summed_loss, token_losses_and_hits

TOKENS, WIDTH, VOCABULARY = 1024, 256, 32_000


def make(dtype: torch.dtype) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, device="cuda", dtype=dtype)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    targets[::4] = IGNORE_INDEX
    return head, hidden, targets


@pytest.mark.parametrize("kernel", ["rows", "compiled", "liger"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("terms", [PLAIN, TokenLoss(1e-2, 0.1)], ids=str)
def test_a_kernel_is_the_plain_loss(kernel, dtype, softcap, terms):
    if kernel == "liger" and importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed")
    head, hidden, targets = make(dtype)
    logits = head(hidden).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    options = {"ignore_index": IGNORE_INDEX, "reduction": "sum", "label_smoothing": terms.label_smoothing}
    plain = F.cross_entropy(logits, targets, **options)
    plain = plain + terms.z_loss * logits.logsumexp(1)[targets != IGNORE_INDEX].square().sum()
    wanted = torch.autograd.grad(plain, [hidden, head.weight])
    for chunk in (None, 100):
        loss = summed_loss(VocabularyHead(head, softcap=softcap), hidden, targets, chunk, kernel=kernel, terms=terms)
        found = torch.autograd.grad(loss, [hidden, head.weight])
        assert loss.item() == pytest.approx(plain.item(), rel=1e-3 if dtype == torch.bfloat16 else 1e-5)
        for one, other in zip(found, wanted, strict=True):
            assert (one.float() - other.float()).norm() < (
                0.02 if dtype == torch.bfloat16 else 1e-4
            ) * other.float().norm()


@pytest.mark.parametrize("count", [None, TOKENS - TOKENS // 4])
def test_the_device_is_not_waited_for(count):
    head, hidden, targets = make(torch.bfloat16)
    summed_loss(VocabularyHead(head), hidden, targets, count=count).backward()  # Asks once what torch has.
    torch.cuda.set_sync_debug_mode("error")
    try:
        summed_loss(VocabularyHead(head), hidden, targets, count=count).backward()
        token_losses_and_hits(VocabularyHead(head), hidden, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
