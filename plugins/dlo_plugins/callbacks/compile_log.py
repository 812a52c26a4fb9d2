"""Counts of torch.compile's work in a run: graphs, graph breaks, recompilations, functions given up, and seconds.

torch shows these only in its logs (``TORCH_LOGS=graph_breaks,recompiles``). The numbers come from ``torch._dynamo``,
which is private: each read of it is one function at the end of this file.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class CompileLog:
    """Counts torch's compilations between :meth:`start` and :meth:`stop`, in this process.

    Attributes:
        graphs: Number of compiled graphs, including recompiled ones.
        breaks: Places and reasons of graph breaks, each with its count.
        recompiles: Reasons of recompilations, each with its count.
        given_up: Reasons for which a function runs uncompiled, each with its count.
        seconds: Wall time of compiling, including backward passes, which torch compiles at their first run.
        grown: Whether there were compilations since the last :meth:`drain`.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.breaks: Counter[str] = Counter()
        self.recompiles: Counter[str] = Counter()
        self.given_up: Counter[str] = Counter()
        self.seconds = 0.0
        self.grown = False
        self._running = False
        self._since = 0.0
        self._seen_breaks = 0
        self._last: Any = None

    def start(self) -> None:
        """Sets all counts to 0, and begins to count."""
        self.graphs, self.seconds = 0, 0.0
        self.breaks, self.recompiles, self.given_up = Counter(), Counter(), Counter()
        self._seen_breaks = len(_graph_breaks())
        compilations = _compilations()
        self._last = compilations[-1] if compilations else None
        self._running, self.grown = True, False
        _add_timers(self._began, self._ended)

    def stop(self) -> None:
        """Counts the compilations since the last call of :meth:`drain`, and ends."""
        if self._running:
            self.drain()
            self._running = False
            _remove_timers(self._began, self._ended)

    def _began(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def _ended(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._since
        self.grown = True

    def drain(self) -> None:
        """Counts the compilations since the last call; torch keeps only the last 64."""
        self.grown = False
        breaks = _graph_breaks()
        # torch.compiler.reset() empties the list.
        new = breaks[self._seen_breaks :] if len(breaks) >= self._seen_breaks else breaks
        self._seen_breaks = len(breaks)
        self.breaks.update(describe_break(one.reason, one.user_stack) for one in new)
        compilations = _compilations()
        places = [place for place, one in enumerate(compilations) if one is self._last]
        for one in compilations[places[-1] + 1 if places else 0 :]:
            self._count(one)
        self._last = compilations[-1] if compilations else None

    def _count(self, one: Any) -> None:
        if one.is_forward is False or one.is_runtime:
            return  # The backward of a graph that was counted, or the tuning of its kernels.
        if one.fail_type:
            self.given_up[first_line(one.fail_reason or one.fail_type)] += 1
        else:
            self.graphs += 1
            if one.recompile_reason:
                self.recompiles[first_line(without_compile_id(one.recompile_reason))] += 1

    def scalars(self) -> dict[str, float]:
        """Returns the counts by their logged names."""
        return {
            "compile/graphs": float(self.graphs),
            "compile/graph_breaks": float(self.breaks.total()),
            "compile/recompiles": float(self.recompiles.total()),
            "compile/given_up": float(self.given_up.total()),
            "compile/seconds": self.seconds,
        }

    def text(self) -> str:
        """Returns the counts as a line, and a line for each reason."""
        total = f"{self.graphs} graph{'s' * (self.graphs != 1)} in {self.seconds:.1f} s"
        counts = (_times(self.breaks, "graph break"), _times(self.recompiles, "recompilation"))
        lines = [f"compiled {total}, {', '.join(counts)}"]
        for what, reasons in (
            ("graph break", self.breaks),
            ("recompiled", self.recompiles),
            ("runs uncompiled", self.given_up),
        ):
            lines += [f"  {what} {count}x: {reason}" for reason, count in reasons.most_common()]
        return "\n".join(lines)


def _times(reasons: Counter[str], what: str) -> str:
    count = reasons.total()
    return f"{count or 'no'} {what}{'s' * (count != 1)}"


def first_line(text: str) -> str:
    """Returns the first line that is not empty; the rest of torch's messages is advice on how to debug."""
    return next((" ".join(line.split()) for line in text.splitlines() if line.strip()), text)


def without_compile_id(reason: str) -> str:
    """Returns a recompilation's reason without the leading number of the old graph, such as ``0/1: ``."""
    return re.sub(r"^\[?\d+/\d+\]?: ", "", reason)


def describe_break(reason: str, stack: Any) -> str:
    """Returns a graph break's reason, with its place in the code if torch knows it."""
    if not stack:
        return first_line(reason)
    place = stack[-1]
    return f"{Path(place.filename).name}:{place.lineno} in {place.name}: {first_line(reason)}"


def _compilations() -> list[Any]:
    """Returns torch's records of its last compilations, oldest first (torch 2.11 to 2.15: private).

    Fields read: ``is_forward``, ``is_runtime``, ``fail_type``, ``fail_reason`` and ``recompile_reason``.
    """
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def _graph_breaks() -> list[Any]:
    """Returns torch's records of all graph breaks so far: ``reason``, ``user_stack`` (2.11 to 2.15: private)."""
    from torch._dynamo.utils import graph_break_reasons

    return graph_break_reasons


def _add_timers(began: Callable[..., None], ended: Callable[..., None]) -> None:
    """Makes torch call ``began`` and ``ended`` around each outermost compilation (2.11 to 2.15: private)."""
    torch._dynamo.callback.on_compile_start(began)
    torch._dynamo.callback.on_compile_end(ended)


def _remove_timers(began: Callable[..., None], ended: Callable[..., None]) -> None:
    """Undoes :func:`_add_timers`."""
    handler: Any = vars(torch._dynamo.callback)["callback_handler"]
    handler.remove_start_callback(began)
    handler.remove_end_callback(ended)
