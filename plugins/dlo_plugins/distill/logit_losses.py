"""Distances between the logits of a student and a teacher, with their gradients in closed form.

With the teacher's probabilities `p = softmax(t / T)` and the student's `q = softmax(s / T)` at a temperature T:

| name | distance | source |
|---|---|---|
| `kl` | `T^2 KL(p, q)` | Distilling the Knowledge in a Neural Network, Hinton et al., 2015, arXiv 1503.02531 |
| `cross_entropy` | `T^2 H(p, q)`; the same gradient as `kl` | the same |
| `reverse_kl` | `T^2 KL(q, p)` | MiniLLM, Gu et al., 2023, arXiv 2306.08543 |
| `jsd` | `T^2 (b KL(p, m) + (1 - b) KL(q, m))`, `m = b p + (1 - b) q` | GKD, Agarwal et al., 2024, arXiv 2306.13649 |
| `wasserstein` | `T sum_i abs(p_(i) - q_(i))`, in descending order | ULD, Boizard et al., 2024, arXiv 2402.12030 |
| `mse` | `mean (s - t)^2` over classes | Do Deep Nets Really Need to be Deep?, Ba & Caruana, 2014, arXiv 1312.6184 |
| `hard` | cross-entropy with the teacher's most probable class | DeiT, Touvron et al., 2021, arXiv 2012.12877 |

Departures: `reverse_kl` and `jsd` have Hinton's factor T^2 too, and `wasserstein` T, so that their gradients do not
shrink with the temperature. ULD is the 1-Wasserstein distance for a uniform cost of transport, and does not ask which
class has a probability: use it with cross-entropy to the targets.

Where the classes are split over ranks, three all-reduces of one or two numbers per sample replace those over the
classes; `wasserstein`, which sorts all classes, gathers the logits instead.

Shapes: n samples, C classes, c classes of this rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dlo_framework.distillation import LogitLoss
from dlo_framework.distributed.vocab_parallel import VocabularyShard
from dlo_framework.errors import DloError, check_choice, check_number

#: Names of the distances.
LogitLossName = Literal["kl", "cross_entropy", "reverse_kl", "jsd", "wasserstein", "mse", "hard"]

#: Losses `[n, 1]`, and their gradients with respect to the student's logits over T, `[n, c]`.
Losses = tuple[Tensor, Tensor | None]
Shard = VocabularyShard | None

#: Distances that do not use the temperature.
WITHOUT_TEMPERATURE = ("mse", "hard")


@dataclass(frozen=True)
class LogitDistance(LogitLoss):
    """Distance between logits by name.

    Args:
        name: Name of the distance.
        temperature: Divisor of both models' logits, T; must be 1 for `mse` and `hard`, which do not use it.
        beta: Weight of the teacher in `jsd`'s mixture; near 0 it behaves as `kl` does, near 1 as `reverse_kl`.

    Raises:
        DloError: If a value is out of range, or has no effect.
    """

    name: LogitLossName = "kl"
    temperature: float = 1.0
    beta: float = 0.5

    def __post_init__(self) -> None:
        check_choice("Distill: loss", self.name, get_args(LogitLossName))
        check_number("Distill: temperature", self.temperature, "above 0", "1 to 4 is usual")
        if self.name in WITHOUT_TEMPERATURE and self.temperature != 1:
            raise DloError(
                f"Distill: temperature must be 1 with loss: {self.name}, which does not use it, got"
                f" {self.temperature}; remove it, or set loss: kl"
            )
        check_number("Distill: beta", self.beta, "above 0 and below 1", "loss: kl for 0, loss: reverse_kl for 1")

    def losses_and_slope(
        self, student: Tensor, teacher: Tensor, shard: Shard = None, *, need_slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the losses, `[n, 1]`, and their gradients, `[n, c]`; overwrites the logits."""
        if self.name == "mse":
            return _mse(student, teacher, shard, need_slope)
        if self.name == "hard":
            return _hard(student, teacher, shard, need_slope)
        for logits in (student, teacher):
            logits.div_(self.temperature)
        if self.name == "wasserstein":
            return _wasserstein(student, teacher, self.temperature, shard, need_slope)
        log_q, log_p = _log_softmax_of_both(student, teacher, shard)
        losses, slope = _DIVERGENCES[self.name](log_q, log_p, self.beta, shard, need_slope)
        return losses * self.temperature**2, None if slope is None else slope.mul_(self.temperature)


def _log_softmax_of_both(student: Tensor, teacher: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of both, written over the logits."""
    highest = torch.cat([student.amax(dim=1, keepdim=True), teacher.amax(dim=1, keepdim=True)], dim=1)
    if shard is not None:
        highest = shard.communicator.maximum(highest)
    for logits, most in zip((student, teacher), highest.split(1, dim=1), strict=True):
        logits.sub_(most)
    totals = [logits.exp().sum(dim=1, keepdim=True) for logits in (student, teacher)]
    for logits, total in zip((student, teacher), _sum(torch.cat(totals, dim=1), shard).split(1, dim=1), strict=True):
        logits.sub_(total.log())
    return student, teacher


def _sum(partial: Tensor, shard: Shard) -> Tensor:
    """Returns sums over this rank's classes, `[n, k]`, summed over the ranks."""
    return partial if shard is None else shard.communicator.sum(partial)


def _sum_classes(values: Tensor, shard: Shard) -> Tensor:
    """Returns the sum over all classes of values `[n, c]`, `[n, 1]`."""
    return _sum(values.sum(dim=1, keepdim=True), shard)


# Each takes the log-probabilities of student and teacher, beta, the shard, and whether to compute the gradient with
# respect to s / T.


def _kl(log_q: Tensor, log_p: Tensor, beta: float, shard: Shard, need_slope: bool) -> Losses:
    p = log_p.exp()
    losses = _sum_classes(log_p.sub_(log_q).mul_(p), shard)
    return losses, log_q.exp_().sub_(p) if need_slope else None


def _cross_entropy(log_q: Tensor, log_p: Tensor, beta: float, shard: Shard, need_slope: bool) -> Losses:
    p = log_p.exp_()
    losses = -_sum_classes(p * log_q, shard)
    return losses, log_q.exp_().sub_(p) if need_slope else None


def _reverse_kl(log_q: Tensor, log_p: Tensor, beta: float, shard: Shard, need_slope: bool) -> Losses:
    q = log_q.exp()
    ratio = log_q.sub_(log_p)
    losses = _sum_classes(q * ratio, shard)
    return losses, q.mul_(ratio.sub_(losses)) if need_slope else None


def _jsd(log_q: Tensor, log_p: Tensor, beta: float, shard: Shard, need_slope: bool) -> Losses:
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).log_().clamp_(min=-torch.finfo(p.dtype).max)
    to_student = log_q.sub_(log_m).mul_(q)  # 0, not NaN, where q underflows: log_q and log_m are finite.
    to_teacher = log_p.sub_(log_m).mul_(p)
    both = _sum(torch.cat([part.sum(dim=1, keepdim=True) for part in (to_teacher, to_student)], dim=1), shard)
    losses = beta * both[:, :1] + (1 - beta) * both[:, 1:]
    if not need_slope:
        return losses, None
    # d/dq is (1 - beta) (log q - log m); the softmax's Jacobian subtracts its mean under q.
    return losses, to_student.sub_(q.mul_(both[:, 1:])).mul_(1 - beta)


_DIVERGENCES: dict[str, Callable[..., Losses]] = {
    "kl": _kl,
    "cross_entropy": _cross_entropy,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
}


def _wasserstein(student: Tensor, teacher: Tensor, temperature: float, shard: Shard, need_slope: bool) -> Losses:
    if shard is not None:
        student, teacher = shard.gather(student), shard.gather(teacher)
    q = torch.softmax(student, dim=1)
    sorted_q, order = q.sort(dim=1, descending=True)
    apart = sorted_q.sub_(torch.softmax(teacher, dim=1).sort(dim=1, descending=True).values)
    losses = apart.abs().sum(dim=1, keepdim=True) * temperature
    if not need_slope:
        return losses, None
    signs = torch.empty_like(q).scatter_(1, order, apart.sign_())
    slope = q * signs.sub_((q * signs).sum(dim=1, keepdim=True))
    return losses, slope if shard is None else slope.narrow(1, shard.first, shard.count)


def _mse(student: Tensor, teacher: Tensor, shard: Shard, need_slope: bool) -> Losses:
    classes = student.shape[1] if shard is None else shard.size
    apart = student.sub_(teacher)
    losses = _sum_classes(apart.square(), shard) / classes
    return losses, apart.mul_(2 / classes) if need_slope else None


def _hard(student: Tensor, teacher: Tensor, shard: Shard, need_slope: bool) -> Losses:
    if shard is None:
        columns = teacher.argmax(dim=1, keepdim=True)
        own = torch.ones_like(columns, dtype=torch.bool)
    else:
        columns, own = (part[:, None] for part in shard.locate_targets(shard.argmax(teacher)))
    log_q, _ = _log_softmax_of_both(student, teacher, shard)
    at_target = torch.where(own, log_q.gather(1, columns), 0)
    losses = -_sum(at_target, shard)
    return losses, log_q.exp_().scatter_add_(1, columns, -own.to(log_q.dtype)) if need_slope else None
