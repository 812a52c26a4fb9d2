"""Trainable parameters without a gradient: found on fake tensors, and errors; and a backward that nobody saw."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlo_framework.errors import DloError, shown_names

if TYPE_CHECKING:
    from dlo_framework.task import Task

#: Why a strategy that allows unused parameters cannot step in backward, and a fix.
USED_AT_THE_END = (
    "parameters may have no gradient on some ranks, so that only at the end of backward it is known which are stepped;"
    " leave out find_unused, and freeze the unused ones"
)


def unused_message(
    names: Sequence[str], allow: str = "set find_unused: true in the strategy", module: Any = None
) -> str:
    """Returns the error message for trainable parameters that no loss depends on.

    Args:
        names: Names of the parameters.
        allow: Fix that allows such parameters, in the imperative.
        module: Module that trains; a task may have a shorter way to freeze them.
    """
    from dlo_framework.task import Task

    own = module.freezes_unused if isinstance(module, Task) else ""
    freeze = own or "set requires_grad to False in configure_model for parameters that are not trained"
    return (
        f"every trainable parameter must get a gradient from the loss, got none for {shown_names(names)}; {freeze}, or"
        f" {allow}"
    )


def find_unused(task: Task, batch: Any) -> list[str]:
    """Returns the names of a task's trainable parameters that get no gradient from a batch.

    A forward and a backward run on fake tensors, so that no weight is read and no memory is needed.

    Args:
        task: Task with its model built, on any device; it is not changed.
        batch: Batch, of which only shapes and dtypes are used.

    Raises:
        DloError: The forward depends on values, which fake tensors do not have.
    """
    from torch.utils._pytree import tree_map

    from dlo_framework.fake_kernels import fake_copy, fake_like, fake_tensors

    try:
        with fake_tensors():
            own, batch = fake_copy(task), tree_map(fake_like, batch)
            args, kwargs = own.inputs(batch)
            own.loss(own.forward(*args, **kwargs), batch).backward()
    except Exception as error:  # Any code of a model's may need values.
        raise DloError(
            f"the parameters without a gradient of {type(task).__name__} must be found by a step on fake tensors, got"
            f" {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}; name them instead"
        ) from error
    return [name for name, parameter in own.named_parameters() if parameter.requires_grad and parameter.grad is None]


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
