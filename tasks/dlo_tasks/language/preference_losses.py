"""Losses of preference tuning, and their metrics.

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

Names: a log-ratio is the log-probability of an answer under the model, minus that under the reference. P pairs,
C completions.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from dlo_tasks.language.evaluation import sum_dtype

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
