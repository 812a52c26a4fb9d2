"""Position of the main thread, read from its stack by other threads: the Lightning hook and the collective it is in.

The monitor's thread reads it once a second. Training itself records nothing, so that it costs a step nothing.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any, NamedTuple

from dlo_framework.registry.registry import own_packages

#: Functions of Lightning (2.6) that call hooks, and the local variable in each with the hook's name.
_CALLS_HOOKS = {
    "_call_callback_hooks": "hook_name",
    "_call_callbacks_state_dict": None,
    "_call_callbacks_on_save_checkpoint": None,
    "_call_lightning_module_hook": "hook_name",
    "_call_lightning_datamodule_hook": "hook_name",
    "_call_strategy_hook": "hook_name",
}
_LIGHTNINGS_CALLS = os.path.join("trainer", "call.py")
#: Number of innermost frames in which to look for a collective.
_NEAR = 4
#: Pattern of dlo's lines that wait for other ranks. It leaves out the backward, in which the main thread may wait for
#: a device's own thread.
_COLLECTIVE = re.compile(r"\bdist\.\w+|_OPS\.\w+|wait_tensor|\.wait\(|\bbarrier\(|\ball_(reduce|gather)")
#: Most frames of a stack to print, from the innermost one.
_MOST_FRAMES = 16


class Position(NamedTuple):
    """Position of a rank in its program, in words.

    Attributes:
        hook: Innermost Lightning hook and its owner: ``on_train_epoch_end of ImageSampler``; empty outside of hooks.
        collective: Collective in which the rank waits: ``all_reduce at collectives.py:167``; empty where it does not.
    """

    hook: str = ""
    collective: str = ""

    def __str__(self) -> str:
        where = f"in {self.hook}" if self.hook else "outside of any hook"
        return f"{where}, waiting in {self.collective}" if self.collective else where


def module_of(function: Any) -> str:
    """Returns the name of the module that defines a function, a partial one too; empty where it is unknown."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


def main_frame() -> FrameType | None:
    """Returns the innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def position_of(frame: FrameType | None) -> Position:
    """Returns the hook and the collective that a frame is in."""
    return Position(hook_of(frame), _collective_of(frame))


def hook_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame of Lightning that calls a hook."""
    while frame is not None:
        if frame.f_code.co_name in _CALLS_HOOKS and frame.f_code.co_filename.endswith(_LIGHTNINGS_CALLS):
            return frame
        frame = frame.f_back
    return None


def hook_of(frame: FrameType | None) -> str:
    """Returns the innermost hook that a frame is in, with its owner; empty outside of hooks."""
    frame = hook_frame(frame)
    if frame is None:
        return ""
    called, values = frame.f_code.co_name, frame.f_locals
    name = values.get(_CALLS_HOOKS[called] or "") or called.removeprefix("_call_callbacks_")
    owner = values.get("callback", values.get("pl_module"))
    if called == "_call_strategy_hook":
        owner = values["trainer"].strategy
    return f"{name} of {type(owner).__name__}" if owner is not None else str(name)


def own_line(frame: FrameType | None) -> str:
    """Returns the innermost line of the user's own code, such as ``sampler.py:12``."""
    while frame is not None and (_is_librarys(frame) or is_dlos(frame)):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "?"


def _is_librarys(frame: FrameType) -> bool:
    installed = "site-packages" in frame.f_code.co_filename or "dist-packages" in frame.f_code.co_filename
    return _is_of(frame, ("torch", "lightning", "pytorch_lightning")) or (installed and not is_dlos(frame))


def is_dlos(frame: FrameType) -> bool:
    """Returns whether a frame is in one of dlo's packages."""
    return _is_of(frame, own_packages())


def _is_of(frame: FrameType, packages: Collection[str]) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages


def _collective_of(frame: FrameType | None) -> str:
    """Returns the collective that the innermost frames wait in, with dlo's or the user's line that called it."""
    collective = ""
    for number, (inner, line) in enumerate(_walk(frame)):
        code = inner.f_code
        if not collective and number < _NEAR:
            if f"torch{os.sep}distributed" in code.co_filename:
                collective = code.co_name
            elif is_dlos(inner):  # A line of other code that matches may wait for anything.
                match = _COLLECTIVE.search(linecache.getline(code.co_filename, line))
                collective = match.group().strip(".(").rpartition(".")[2] if match else ""
        if collective and not _is_librarys(inner):
            return f"{collective} at {os.path.basename(code.co_filename)}:{line}"
        if not collective and number >= _NEAR:
            break
    return collective


def is_saving(frame: FrameType | None) -> bool:
    """Returns whether a frame is inside the saving of a checkpoint."""
    return any(outer.f_code.co_name == "save_checkpoint" for outer, _ in _walk(frame))


def _walk(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Yields a frame and its callers, with the line of each."""
    return traceback.walk_stack(frame) if frame is not None else iter(())


class StackSampler:
    """Samples the main thread's position, and measures how long it has waited in one collective."""

    def __init__(self) -> None:
        self._last, self._since, self._cpu = 0, 0.0, 0.0
        self.position = Position()

    def sample(self, passed: float) -> float:
        """Takes a sample.

        Args:
            passed: Seconds since the last sample that count.

        Returns:
            Seconds that the main thread has waited in one collective; 0 outside of collectives.
        """
        frame = main_frame()
        # The mark stays the same while the thread stays at one instruction of one call.
        mark, cpu = hash(tuple((id(outer), outer.f_lasti) for outer, _ in _walk(frame))), _main_threads_cpu_seconds()
        # A thread that spins or computes is not waiting; loops that poll stay at one place for a sample or two.
        moved = mark != self._last or cpu - self._cpu > 0.1 * max(passed, 0.1)
        self._last, self._cpu = mark, cpu
        self._since = 0.0 if moved else self._since + passed
        self.position = Position() if moved else position_of(frame)
        return self._since if self.position.collective else 0.0


def _main_threads_cpu_seconds() -> float:
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


def print_stack(rank: int, world_size: int, error: BaseException | None = None) -> None:
    """Prints the main thread's stack to standard error, in one write, so that the ranks' output does not mix.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        error: Exception with which the main thread has left the place; None where it is still there.
    """
    frame = main_frame()
    if error is None:
        walk = itertools.islice(_walk(frame), _MOST_FRAMES)
        lines, position = traceback.StackSummary.extract(walk).format()[::-1], position_of(frame)
    else:
        # Its frames have returned, and no longer know their callers.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        hook = next((hook_name for frame in reversed(frames) if (hook_name := hook_of(frame))), "")
        position = Position(hook, _collective_of(frames[-1] if frames else None))
        lines = traceback.format_tb(error.__traceback__)[-_MOST_FRAMES:]
    name = f"rank {rank} of {world_size}" if world_size > 1 else "this process"
    head = f"dlo: {name} (pid {os.getpid()} on {socket.gethostname()}) was {position}:\n"
    if sys.stderr is not None:
        sys.stderr.write(head + "".join(lines))
        sys.stderr.flush()
