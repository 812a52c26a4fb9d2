"""Check, before ranks start, that each trainable parameter gets a gradient: a step on fake tensors.

A backward on fake tensors starts autograd's threads for devices, after which torch (2.14) refuses backward in forked
processes. The ranks of a notebook are forked from its process: so there the check runs in a forked copy, which ends
with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Callback

from dlo_framework.distributed.unused_parameters import find_unused, unused_message
from dlo_framework.errors import DloError
from dlo_framework.registry.entry_points import own_packages
from dlo_framework.runs import is_first_process
from dlo_framework.task import Task

#: Hooks before the first step, in which a user's code may freeze parameters.
_EARLY_HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")


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
    example = module.example_batch(datamodule)
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
