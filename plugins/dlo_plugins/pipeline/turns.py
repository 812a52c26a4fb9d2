"""Turns of a forward and a backward, of which one computes while the other's exchange is under way.

DeepSeek-V3 Technical Report. 2024, arXiv 2412.19437, section 3.2.1. Departures: the paper also divides the device's
multiprocessors between both, and orders the parts of a block by hand; here the turn passes at each exchange of experts,
wherever it is.

The backward runs in a thread of its own, because autograd cannot pause one. Only one of the two threads runs at any
time, and the turn passes only where an exchange has been started: so all ranks start all collectives in the same order,
and each side runs the operations that it runs alone.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from dlo_framework.experts.step_counts import get_micro_batch, set_micro_batch
from dlo_plugins.pipeline.random_state import get_random_state, set_random_state
from dlo_plugins.pipeline.thread_state import ThreadState, get_mode_notes, set_mode_notes

#: Sides of a pair: that of the calling thread, and that of the other one, to which autograd's threads belong.
_FORWARD, _BACKWARD = 0, 1


class _Stopped(BaseException):
    """Ends a side whose other side has raised."""


@dataclass
class _Pair:
    """Two sides that take turns.

    Attributes:
        thread: Thread of the forward.
        turn: Side that runs.
        ended: Sides that have ended.
        is_waiting: Whether the backward has only its end to do, for which it waits.
        kept: Values of the side that does not run, of what both sides change.
        error: First error of a side.
        is_over: Event of the backward's end.
    """

    thread: int
    turn: int = _FORWARD
    ended: set[int] = field(default_factory=set)
    is_waiting: bool = False
    kept: dict[int, list[Any]] = field(default_factory=dict)
    error: BaseException | None = None
    is_over: threading.Event = field(default_factory=threading.Event)

    def fail(self, error: BaseException) -> None:
        """Notes an error, unless it ends a side because the other has raised."""
        if self.error is None and not isinstance(error, _Stopped):
            self.error = error


class Turns:
    """Runs a forward and a backward that take turns, and passes the turn.

    What is one for all threads, and what both sides change, is kept for each side: random states, so that the
    recomputation of one draws nothing from the other's, the micro-batch that routers count for, and what :meth:`keep`
    names. Both sides begin with the values of before, and the forward's remain.

    Args:
        device: Device on which both compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._condition = threading.Condition()
        self._pair: _Pair | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._kept: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
            (functools.partial(get_random_state, device), functools.partial(set_random_state, device=device)),
            (get_micro_batch, set_micro_batch),
            (get_mode_notes, set_mode_notes),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Turns:
        return self  # A copy of the model has the same ranks.

    def keep(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """Keeps a value for each side.

        Args:
            read: Function that returns the value.
            write: Function that sets it.
        """
        self._kept.append((read, write))

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Runs both functions, the forward first; returns when both have ended.

        Raises:
            BaseException: The first error of either; the other is ended at its next turn.
        """
        pair = self._pair = _Pair(threading.get_ident())
        pair.kept[_BACKWARD] = self._read()
        self._start(functools.partial(self._run_backward, pair, ThreadState(self._device), backward))
        try:
            forward()
        except BaseException as error:
            pair.fail(error)
        finally:
            remaining = self._read()
            self._end(pair, _FORWARD)
            pair.is_over.wait()
            self._pair = None
            self._write(remaining)
        first, pair.error = pair.error, None
        if first is not None:
            try:
                raise first
            finally:
                del first  # Its traceback refers to this frame.

    @property
    def is_shared(self) -> bool:
        """Whether the calling side has another one that can compute."""
        pair = self._pair
        if pair is None:
            return False
        other = 1 - self._side(pair)
        return other not in pair.ended and not (other == _BACKWARD and pair.is_waiting)

    def pass_on(self) -> bool:
        """Lets the other side run until it passes the turn or ends; returns whether there is one that can compute.

        Call it after the start of an exchange, and before the wait for it.
        """
        if not self.is_shared:
            return False
        pair = self._pair
        assert pair is not None
        side = self._side(pair)
        pair.kept[side] = self._read()
        self._give(pair, 1 - side)
        self._wait_for_turn(pair, side)
        return True

    def end_last(self, result: Tensor) -> Tensor:
        """Returns a tensor with the same backward, which ends only after the forward has.

        When a backward ends, FSDP2 sets the state of all its units, also of one whose forward is running.

        Args:
            result: Tensor at which the backward begins.
        """
        root = result.view_as(result)
        root.register_hook(self._queue_wait)
        return root

    def _queue_wait(self, gradient: Tensor) -> None:
        # Callbacks run in the order in which they are queued: this one comes before FSDP's.
        Variable._execution_engine.queue_callback(self._wait_for_forward)

    def _wait_for_forward(self) -> None:
        pair = self._pair
        if pair is None or _FORWARD in pair.ended:
            return
        pair.is_waiting, pair.kept[_BACKWARD] = True, self._read()
        self._give(pair, _FORWARD)
        self._wait_for_turn(pair, _BACKWARD)

    def _run_backward(self, pair: _Pair, state: ThreadState, backward: Callable[[], None]) -> None:
        try:
            self._wait_for_turn(pair, _BACKWARD)
            state.run(backward)
        except BaseException as error:
            pair.fail(error)
        finally:
            self._end(pair, _BACKWARD)
            pair.is_over.set()

    def _side(self, pair: _Pair) -> int:
        return _FORWARD if threading.get_ident() == pair.thread else _BACKWARD

    def _give(self, pair: _Pair, side: int) -> None:
        with self._condition:
            pair.turn = side
            self._condition.notify_all()

    def _wait_for_turn(self, pair: _Pair, side: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: pair.turn == side)
        if pair.error is not None:
            raise _Stopped
        self._write(pair.kept.pop(side))

    def _end(self, pair: _Pair, side: int) -> None:
        pair.ended.add(side)
        self._give(pair, 1 - side)

    def _read(self) -> list[Any]:
        return [read() for read, _ in self._kept]

    def _write(self, values: list[Any]) -> None:
        for (_, write), value in zip(self._kept, values, strict=True):
            write(value)

    def _start(self, task: Callable[[], None]) -> None:
        """Runs a task in the thread of backwards, which starts with the first and ends with this object."""
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            weakref.finalize(self, self._tasks.put, None)
            threading.Thread(target=_serve, args=(self._tasks,), name="dlo-backward", daemon=True).start()
        self._tasks.put(task)


def _serve(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task
