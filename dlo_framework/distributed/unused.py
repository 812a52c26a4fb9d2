"""Parameters that train and get no gradient, or get one unseen: what to say of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dlo_framework.errors import DloError


def unused_message(names: Sequence[str], allow: str = "set find_unused: true in the strategy") -> str:
    """Returns what to say of parameters that no loss depends on.

    Args:
        names: of the parameters.
        allow: how a config says that it is meant so.
    """
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"every trainable parameter must get a gradient from the loss, but {shown} got none; set requires_grad"
        f" to False in configure_model for what is not trained, or {allow}"
    )


def unused_numbers(message: str) -> list[int]:
    """Returns the numbers of the parameters that DistributedDataParallel's reducer misses, of those that train.

    torch (2.15) raises a RuntimeError with them as the next backward is prepared, names them only where
    ``TORCH_DISTRIBUTED_DEBUG`` is set before the start, and has no type of error or attribute for it.

    Args:
        message: of an error; empty is returned for any other.
    """
    found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", message)
    return [int(number) for number in found.group(1).split()] if found else []


def check_announced(announced: bool) -> None:
    """Checks that a strategy that shards has been told of a backward, whose gradients it brings to the optimizers.

    Raises:
        DloError: if it has not: ``loss.backward()`` in manual optimization.
    """
    if not announced:
        raise DloError(
            "gradients must come from self.manual_backward(loss) under a strategy that shards, got them from"
            " loss.backward(); call the former, or take strategy ddp"
        )
