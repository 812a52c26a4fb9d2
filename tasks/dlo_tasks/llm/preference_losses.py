"""Losses of preference tuning with their metrics, and the log-probabilities of tokens that they are functions of.

* :func:`dpo_losses`: Direct Preference Optimization. Rafailov et al., 2023, arXiv 2305.18290, equation 7.
* :func:`ipo_losses`: A General Theoretical Paradigm to Understand Learning from Human Preferences. Azar et al., 2023,
  arXiv 2310.12036, equation 17.
* :func:`hinge_losses`: SLiC-HF: Sequence Likelihood Calibration with Human Feedback. Zhao et al., 2023, arXiv
  2305.10425, equation 2.
* :func:`kto_losses`: KTO: Model Alignment as Prospect Theoretic Optimization. Ethayarajh et al., 2024, arXiv
  2402.01306, equation 8.
* :func:`orpo_losses`: ORPO: Monolithic Preference Optimization without Reference Model. Hong et al., 2024, arXiv
  2403.07691, equation 7.
* :func:`simpo_losses`: SimPO: Simple Preference Optimization with a Reference-Free Reward. Meng et al., 2024, arXiv
  2405.14734, equation 6.

Departures, which are TRL's (1.16) too: IPO averages the log-ratios over an answer's tokens, as its authors confirmed to
TRL; the hinge loss is of the log-ratios to the reference (RSO, Liu et al., 2023, arXiv 2309.06657), where SLiC-HF has
the log-probabilities alone.

Log-probabilities are computed in chunks of tokens, so that all logits are never in memory at once.
:mod:`dlo_tasks.llm.vocabulary_loss` sums the losses, whose gradient is then known but for a factor, and computes it in
forward. Here each token's gradient has a factor of its own, which follows from all tokens of an answer: backward
computes a chunk's logits again, scales the gradient of each token, and frees them.

Names: a log-ratio is the log-probability of an answer under the model, minus that under the reference. P pairs,
C completions, N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from dlo_framework.distributed.vocab_parallel import VocabularyShard
from dlo_framework.fake_kernels import FakeTensor
from dlo_tasks.llm import vocabulary_loss
from dlo_tasks.llm.batches import IGNORE_INDEX
from dlo_tasks.llm.evaluation import sum_dtype
from dlo_tasks.llm.vocabulary_head import VocabularyHead, autocast_dtype, head_width, is_quantised, run_inside
from dlo_tasks.llm.vocabulary_loss import Kernel

Objective = Literal["dpo", "ipo", "hinge", "kto", "orpo", "simpo"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
#: Objectives that compare with a reference model.
WITH_REFERENCE = ("dpo", "ipo", "hinge", "kto")
#: Default of `beta`: the papers' and, for the hinge loss, TRL's.
DEFAULT_BETA = {"dpo": 0.1, "ipo": 0.1, "hinge": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}


def dpo_losses(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Returns the loss of each pair, `[P]`: the negative log-probability that the chosen answer is preferred.

    Args:
        chosen: Log-ratios of the chosen answers, `[P]`.
        rejected: Log-ratios of the rejected answers, `[P]`.
        beta: Weight of the divergence from the reference.
    """
    return -F.logsigmoid(beta * (chosen - rejected))


def ipo_losses(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Returns the loss of each pair, `[P]`: the squared distance of the margin from `1 / (2 beta)`.

    Args:
        chosen: Mean log-ratios per token of the chosen answers, `[P]`.
        rejected: Mean log-ratios per token of the rejected answers, `[P]`.
        beta: Weight of the divergence from the reference, the paper's tau.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def hinge_losses(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Returns the loss of each pair, `[P]`, which is 0 from a margin of `1 / beta` on.

    Args:
        chosen: Log-ratios of the chosen answers, `[P]`.
        rejected: Log-ratios of the rejected answers, `[P]`.
        beta: Reciprocal of the margin.
    """
    return torch.relu(1 - beta * (chosen - rejected))


def kto_losses(
    ratios: Tensor, desirable: Tensor, divergence: Tensor, beta: float, weights: tuple[float, float] = (1.0, 1.0)
) -> Tensor:
    """Returns the loss of each completion, `[C]`.

    Args:
        ratios: Log-ratios of the completions, `[C]`.
        desirable: Whether a completion is desirable, bool `[C]`.
        divergence: Estimate of the divergence from the reference, a scalar without a gradient; see
            :func:`kto_divergence`.
        beta: Weight of the divergence from the reference.
        weights: Weights of desirable and of undesirable completions.
    """
    gains = torch.where(desirable, ratios - divergence, divergence - ratios)
    return torch.where(desirable, *weights) * (1 - torch.sigmoid(beta * gains))


def kto_divergence(total: Tensor, count: Tensor) -> Tensor:
    """Returns the estimate of the divergence from the reference, a scalar that is not negative.

    Args:
        total: Sum of the log-ratios of mismatched completions: prompts with another prompt's completion.
        count: Number of them.
    """
    return (total / count.to(total.dtype).clamp(min=1e-9)).clamp(min=0)


def orpo_losses(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Returns the odds-ratio loss of each pair, `[P]`; the loss of ORPO adds the cross-entropy of the chosen answers.

    Args:
        chosen: Mean log-probabilities per token of the chosen answers, `[P]`, negative.
        rejected: Mean log-probabilities per token of the rejected answers, `[P]`, negative.
        beta: Weight of the odds ratio, the paper's lambda.
    """
    return -beta * F.logsigmoid(chosen - rejected - (_log_complement(chosen) - _log_complement(rejected)))


def simpo_losses(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """Returns the loss of each pair, `[P]`.

    Args:
        chosen: Mean log-probabilities per token of the chosen answers, `[P]`.
        rejected: Mean log-probabilities per token of the rejected answers, `[P]`.
        beta: Scale of the rewards.
        gamma: Margin by which the chosen reward should exceed the rejected one.
    """
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def _log_complement(log_prob: Tensor) -> Tensor:
    """Returns `log(1 - exp(x))` of negative `x`, without cancellation."""
    near = log_prob > -math.log(2)
    # Each branch gets arguments inside its range, so that the gradient of the other one is finite.
    small = torch.where(near, log_prob, -math.log(2))
    large = torch.where(near, -math.log(2), log_prob)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


# --- metrics ------------------------------------------------------------------------------------------------------


class CombinedMeans(Metric):
    """Sum or difference of two means, each of its own number of values.

    Args:
        signs: Sign of each mean.
    """

    full_state_update = False
    totals: Tensor
    counts: Tensor

    def __init__(self, signs: tuple[int, int]) -> None:
        super().__init__()
        self._signs = signs
        self.add_state("totals", torch.zeros(2, dtype=sum_dtype()), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(2, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, totals: Tensor, counts: Tensor) -> None:
        """Adds a batch.

        Args:
            totals: Sums of the values, `[2]`.
            counts: Numbers of the values, `[2]`.
        """
        self.totals += totals
        self.counts += counts

    def compute(self) -> Tensor:
        """Returns the combined means, a float32 scalar; NaN without values of one."""
        first, second = self.totals / self.counts
        return (self._signs[0] * first + self._signs[1] * second).float()


class KTOLoss(Metric):
    """Mean loss of KTO, with the divergence of all batches, so that it does not depend on the batch size.

    Args:
        beta: Weight of the divergence from the reference.
        weights: Weights of desirable and of undesirable completions.
    """

    full_state_update = False
    ratios: list[Tensor]
    desirable: list[Tensor]
    total: Tensor
    count: Tensor

    def __init__(self, beta: float, weights: tuple[float, float]) -> None:
        super().__init__()
        self._beta, self._weights = beta, weights
        self.add_state("ratios", [], dist_reduce_fx="cat")
        self.add_state("desirable", [], dist_reduce_fx="cat")
        self.add_state("total", torch.tensor(0.0, dtype=sum_dtype()), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, ratios: Tensor, desirable: Tensor, total: Tensor, count: Tensor) -> None:
        """Adds a batch.

        Args:
            ratios: Log-ratios of the completions, `[C]`.
            desirable: Whether each is desirable, bool `[C]`.
            total: Sum of the log-ratios of mismatched completions.
            count: Number of them.
        """
        self.ratios.append(ratios)
        self.desirable.append(desirable)
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        """Returns the mean loss, a float32 scalar."""
        ratios, desirable = (
            torch.cat(values) if isinstance(values, list) else values for values in (self.ratios, self.desirable)
        )
        divergence = kto_divergence(self.total, self.count).to(ratios.dtype)
        return kto_losses(ratios, desirable.bool(), divergence, self._beta, self._weights).mean().float()


# --- log-probabilities of tokens ----------------------------------------------------------------------------------


def token_log_probs(
    head: VocabularyHead, hidden: Tensor, targets: Tensor, chunk: int | None = None, count: int | None = None
) -> Tensor:
    """Returns the log-probability of each token's target, `[N]` in float32 or wider; 0 for tokens without one.

    A head that is gathered on use is called once, with all chunks inside the call: ranks must call it equally often.
    One with a LoRA adapter, a factor or another `output_dtype` computes all logits at once then.

    Args:
        head: Head of the model.
        hidden: Hidden states, `[N, D]`: the last block's normalised output.
        targets: Target ids, `[N]`; :data:`IGNORE_INDEX` for tokens without one.
        chunk: Tokens per chunk; by default computed from the vocabulary size.
        count: Number of targets, if known; see :func:`dlo_tasks.llm.vocabulary_loss.summed_loss`.
    """
    if isinstance(hidden, FakeTensor):
        return -token_losses(head, hidden, targets)
    shard = head.shard
    if shard is not None:
        hidden = shard.enter(hidden)
    is_target = targets != IGNORE_INDEX
    kernel = vocabulary_loss.default_kernel(hidden.device)
    some, of_these = vocabulary_loss.select_targets(hidden, targets, count, waits=kernel == "columns")

    def fused(head: VocabularyHead, hidden: Tensor) -> Tensor:
        linear: Any = head.module
        if is_quantised(linear):  # In the call that gathers it.
            return token_losses(head, hidden, of_these)
        dtype = autocast_dtype(hidden.device) or hidden.dtype
        rows = chunk or vocabulary_loss.chunk_tokens(linear.weight.shape[0], len(of_these), kernel)
        losses: Tensor = _TokenLosses.apply(
            *(hidden, linear.weight, linear.bias, of_these, head.softcap, dtype, rows, shard, kernel)
        )
        return losses

    if head.fuses:
        losses = run_inside(head, some, fused) if head.is_gathered else fused(head, some)
    elif head.is_gathered:
        losses = token_losses(head, some, of_these)
    else:
        rows = chunk or vocabulary_loss.chunk_tokens(head_width(head), len(of_these), kernel)
        chunks = zip(some.split(rows), of_these.split(rows), strict=True) if len(of_these) else ()
        found = [checkpoint(token_losses, head, h, t, use_reentrant=False) for h, t in chunks]
        losses = torch.cat(found) if found else some.float().sum(dim=1)
    if len(losses) == len(targets):
        return -losses
    return torch.zeros(targets.shape, dtype=losses.dtype, device=losses.device).masked_scatter(is_target, -losses)


def token_losses(head: VocabularyHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """Returns each token's cross-entropy, `[N]`, from all their logits at once; 0 for tokens without a target.

    Where the vocabulary is split, pass `hidden` through :meth:`VocabularyShard.enter` first.
    """
    if head.shard is None:
        return F.cross_entropy(head.logits(hidden), targets, ignore_index=IGNORE_INDEX, reduction="none")
    losses = head.shard.cross_entropy(head.own_logits(hidden), targets)
    return losses.masked_fill(targets == IGNORE_INDEX, 0)


class _TokenLosses(torch.autograd.Function):
    """Cross-entropies of `hidden @ weight.T + bias`, `[N]`; backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        dtype: torch.dtype,
        rows: int,
        shard: VocabularyShard | None,
        kernel: Kernel,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.options = (softcap, dtype, rows, shard, kernel)
        found = [losses for _, _, losses, _ in _chunks(hidden, weight, bias, targets, *ctx.options, need_slope=False)]
        return torch.cat(found) if found else hidden.new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, targets = ctx.saved_tensors
        (grad,) = grads
        dtype = ctx.options[1]
        with torch.no_grad():
            parts = vocabulary_loss.HeadGradients(hidden, weight, bias, dtype, ctx.needs_input_grad[:3])
            for start, h, _, slope in _chunks(hidden, weight, bias, targets, *ctx.options, need_slope=True):
                parts.add(start, h, slope.mul_(grad[start : start + len(h), None]))
            return (*parts.scaled(torch.ones((), device=grad.device)), *(None,) * 6)


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    softcap: float | None,
    dtype: torch.dtype,
    rows: int,
    shard: VocabularyShard | None,
    kernel: Kernel,
    *,
    need_slope: bool,
) -> Any:
    """Yields each chunk's first token, hidden states `[n, D]`, losses `[n]` and their gradient `[n, V]`, or None."""
    with torch.autocast(hidden.device.type, enabled=False):
        for start, h, logits in vocabulary_loss.project_chunks(hidden, weight.detach().to(dtype), bias, rows, kernel):
            t = targets[start : start + rows, None]
            ignored = t == IGNORE_INDEX
            losses, slope = vocabulary_loss.losses_and_slope(
                logits, t.clamp(min=0), softcap, shard, need_slope=need_slope
            )
            if slope is not None:
                slope = slope.masked_fill_(ignored, 0)
            yield start, h, losses.masked_fill_(ignored, 0)[:, 0], slope
