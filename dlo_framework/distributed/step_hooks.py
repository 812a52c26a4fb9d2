"""Step hooks of optimizers that run before those of the strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def prepend_post_hook(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Registers a hook that runs right after an optimizer's step, before hooks that were registered earlier.

    Strategies that shard register a hook that publishes the stepped values to the other ranks. What this hook writes is
    published with them. torch (2.11 to 2.15) has no option for the order: this function moves the entry in
    ``_optimizer_step_post_hooks``.

    Args:
        optimizer: Optimizer whose step calls hooks.
        hook: Function of the optimizer and the step's arguments.
    """
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle
