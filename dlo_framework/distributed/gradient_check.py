"""Trainable parameters without a gradient: found before ranks start by a step on fake tensors, and named in errors.

A backward on fake tensors starts autograd's threads for devices, after which torch (2.14) refuses backward in forked
processes. The ranks of a notebook are forked from its process: so there the check runs in a forked copy, which ends
with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Callback

from dlo_framework.ability import find_ability
from dlo_framework.batches import tree_map
from dlo_framework.errors import DloError, shown_names
from dlo_framework.registry.registry import own_packages
from dlo_framework.run.runs import is_first_process
from dlo_framework.task import Task, find_example
from dlo_framework.task_abilities import FreezesUnused

#: Hooks before the first step, in which a user's code may freeze parameters.
_EARLY_HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")
#: Why a strategy that allows unused parameters cannot step in backward, and a fix.
USED_AT_THE_END = (
    "parameters may have no gradient on some ranks, so that only at the end of backward it is known which are stepped;"
    " leave out find_unused, and freeze the unused ones"
)


def check_gradients(module: Any, datamodule: Any, callbacks: Sequence[Callback], *, allow: str) -> None:
    """Checks that a step gives each trainable parameter a gradient, as a run's first step would.

    It checks tasks whose step and whose loss are known before the run, and whose forward does not depend on values; the
    first step of the run checks the others. A process that is already a rank checks nothing.

    Args:
        module: LightningModule of the run; it is not changed.
        datamodule: Datamodule of the run, which may know the shapes of a batch; None without one.
        callbacks: Callbacks of the run; a user's callback may freeze parameters before the first step.
        allow: Fix that allows parameters without a gradient under the strategy, in the imperative.

    Raises:
        DloError: Parameters get none; the message names them.
    """
    if dist.is_initialized() or not is_first_process() or not isinstance(module, Task):
        return
    if not trains_by_loss(module) or any(may_freeze(callback) for callback in callbacks):
        return
    example = find_example(module, datamodule)
    if example is None:
        return
    run_check(partial(_check_step, module, example, allow))


def _check_step(module: Task, example: Any, allow: str) -> None:
    task = module.on_meta()
    try:
        absent = find_unused(task, example)
    except DloError:  # The forward needs values.
        return
    absent = still_trained(task, absent)
    if absent:
        raise DloError(unused_message(absent, allow, module))


def trains_by_loss(task: Task) -> bool:
    """Returns whether a run's step is the task's loss and nothing else, with the parameters that train now."""
    own = type(task)
    if not task.automatic_optimization or own.training_step is not Task.training_step:
        return False
    hooks = (*_EARLY_HOOKS, "configure_callbacks")
    return is_shipped(own) or all(getattr(own, hook) is getattr(Task, hook) for hook in hooks)


def may_freeze(callback: Callback) -> bool:
    """Returns whether a callback runs a user's code before the first step."""
    own = type(callback)
    return not is_shipped(own) and any(getattr(own, hook) is not getattr(Callback, hook) for hook in _EARLY_HOOKS)


def is_shipped(kind: type) -> bool:
    """Returns whether a class is dlo's or Lightning's, and so known not to freeze parameters in a hook."""
    return kind.__module__.partition(".")[0] in (*own_packages(), "lightning")


def still_trained(task: Task, names: Sequence[str]) -> list[str]:
    """Returns the named parameters that still train after a user's ``configure_optimizers``; none if it fails.

    Args:
        task: Task, of which a fake copy is asked.
        names: Names of parameters.
    """
    from dlo_framework.fake_kernels import fake_copy, fake_tensors

    if not names or is_shipped(type(task)):
        return list(names)
    with contextlib.suppress(Exception):  # It needs a trainer or values: the run's first step checks instead.
        with fake_tensors():
            own = fake_copy(task)
            own.configure_optimizers()
        trained = {name for name, parameter in own.named_parameters() if parameter.requires_grad}
        return [name for name in names if name in trained]
    return []


def run_check(check: Callable[[], None]) -> None:
    """Runs a check that returns nothing, in a forked copy of this process if that is a notebook's.

    A copy that dies, for example for want of memory, has found nothing: the ranks check again in their first step.

    Raises:
        DloError: The check refuses the run.
    """
    if not _IS_INTERACTIVE:
        check()
        return
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_and_send, args=(check, sender))
    process.start()
    sender.close()
    try:
        message = receiver.recv()
    except EOFError:
        message = ""
    process.join()
    if message:
        raise DloError(message)


def _run_and_send(check: Callable[[], None], sender: Connection) -> None:
    torch.set_num_threads(1)  # A forked process has none of OpenMP's threads.
    try:
        check()
    except DloError as error:
        sender.send(str(error))
    else:
        sender.send("")


def unused_message(
    names: Sequence[str], allow: str = "set find_unused: true in the strategy", module: Any = None
) -> str:
    """Returns the error message for trainable parameters that no loss depends on.

    Args:
        names: Names of the parameters.
        allow: Fix that allows such parameters, in the imperative.
        module: Module that trains; a task may have a shorter way to freeze them.
    """
    freezes = find_ability(module, FreezesUnused)
    own = "" if freezes is None else freezes.freezes_unused
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
    match = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", message)
    return [int(number) for number in match.group(1).split()] if match else []


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
