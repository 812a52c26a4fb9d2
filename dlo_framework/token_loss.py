"""Loss of a token from its logits: cross-entropy with label smoothing and z-loss, and the gradient.

Rethinking the Inception Architecture for Computer Vision. Szegedy et al., 2015, arXiv 1512.00567, section 7: label
smoothing. PaLM: Scaling Language Modeling with Pathways. Chowdhery et al., 2022, arXiv 2204.02311, section 5: z-loss,
which keeps the logarithm of the softmax's normaliser close to 0; there its factor is 1e-4.

With `log Z` the logarithm of the sum of the exponentials of a token's logits `x [V]`, `t` its target, `e` the label
smoothing and `z` the factor of the z-loss::

    loss = log Z - (1 - e) x[t] - e mean(x) + z (log Z)^2
    d loss / d x[j] = softmax(x)[j] (1 + 2 z log Z) - (1 - e) [j = t] - e / V
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dlo_framework.errors import DloError, check_number


@dataclass(frozen=True)
class TokenLoss:
    """Terms of a token's loss beside the cross-entropy.

    Attributes:
        z_loss: Factor of the squared logarithm of the softmax's normaliser.
        label_smoothing: Probability that is spread evenly over the vocabulary, as in torch's `cross_entropy`.

    Raises:
        DloError: If a value is out of range.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.z_loss < float("inf"):
            raise DloError(f"z_loss must be at least 0, got {self.z_loss}; PaLM uses 1e-4, and 0 leaves it out")
        check_number("label_smoothing", self.label_smoothing, "at least 0 and below 1", "0 leaves it out")

    @property
    def is_plain(self) -> bool:
        """Whether the loss is the cross-entropy alone."""
        return not self.z_loss and not self.label_smoothing

    def losses(self, above: Tensor, highest: Tensor, at_target: Tensor, mean: Tensor | None) -> Tensor:
        """Returns the losses of tokens; all tensors are `[N, 1]`.

        Args:
            above: Logarithm of the normaliser, relative to the highest logit.
            highest: Highest logit.
            at_target: Logit of the target, relative to the highest.
            mean: Mean of the logits, relative to the highest; None without label smoothing.
        """
        losses = above - at_target
        if mean is not None:
            losses = losses + self.label_smoothing * (at_target - mean)
        return losses + self.z_loss * (above + highest).square() if self.z_loss else losses

    def slope(self, shares: Tensor, log_total: Tensor, columns: Tensor, own: Tensor | None, size: int) -> Tensor:
        """Returns the gradient of the losses with respect to the logits, in place of the probabilities `shares [N, v]`.

        Args:
            shares: Probabilities of this rank's slice of the vocabulary.
            log_total: Logarithm of the normaliser, `[N, 1]`.
            columns: Column of each target in the slice, `[N, 1]`.
            own: Mask of the targets in the slice, `[N, 1]`; None for all.
            size: Size of the full vocabulary.
        """
        if self.z_loss:
            shares.mul_(1 + 2 * self.z_loss * log_total)
        if self.label_smoothing:
            shares.sub_(self.label_smoothing / size)
        at_target = 1 - self.label_smoothing
        of_targets = at_target if own is None else at_target * own.to(shares.dtype)
        return shares.scatter_(1, columns, shares.gather(1, columns) - of_targets)


#: The cross-entropy alone.
PLAIN = TokenLoss()
