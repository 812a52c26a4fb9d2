"""Errors for trainable parameters without a gradient, and for a backward that the strategy did not see."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dlo_framework.errors import DloError, shown_names


def unused_message(names: Sequence[str], allow: str = "set find_unused: true in the strategy") -> str:
    """Returns the error message for trainable parameters that no loss depends on.

    Args:
        names: Names of the parameters.
        allow: Fix that allows such parameters, in the imperative.
    """
    return (
        f"every trainable parameter must get a gradient from the loss, got none for {shown_names(names)}; set"
        f" requires_grad to False in configure_model for parameters that are not trained, or {allow}"
    )


def unused_numbers(message: str) -> list[int]:
    """Returns the numbers, among the trainable ones, of parameters without a gradient in DistributedDataParallel.

    torch (2.15) raises a RuntimeError with the numbers when the next backward is prepared. It gives names only where
    ``TORCH_DISTRIBUTED_DEBUG`` is set before the start, and has no error class or attribute for it.

    Args:
        message: Text of an error; the result is empty for other errors.
    """
    found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", message)
    return [int(number) for number in found.group(1).split()] if found else []


def check_backward_seen(announced: bool) -> None:
    """Checks that a sharding strategy has seen a backward, so that it can reduce the gradients.

    Args:
        announced: Whether the strategy's hook before the backward was called.

    Raises:
        DloError: if not: ``loss.backward()`` was called in manual optimization.
    """
    if not announced:
        raise DloError(
            "gradients must come from self.manual_backward(loss) under a strategy that shards, got them from"
            " loss.backward(); call self.manual_backward(loss), or use strategy ddp"
        )
