"""`run_check`: runs a check before ranks start, in a copy of a notebook's process.

A backward on fake tensors starts autograd's threads for devices, after which torch (2.14) refuses backward in forked
processes. The ranks of a notebook are forked from its process: so the check runs in a forked copy, which ends with it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from lightning.fabric.utilities.imports import _IS_INTERACTIVE

from dlo_framework.errors import DloError


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
