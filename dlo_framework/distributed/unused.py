"""Parameters that train and get no gradient: what to say of them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def unused_message(names: Sequence[str], allow: str = "set find_unused: true in the strategy") -> str:
    """Returns what to say of parameters that no loss depends on.

    Args:
        names: of the parameters.
        allow: how a config says that it is meant so.
    """
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"every trainable parameter must get a gradient from the loss, but {shown} got none; freeze what is not"
        f" trained (requires_grad=False), or {allow}"
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
