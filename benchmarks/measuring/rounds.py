"""Contestants that take turns, the clocks that time them, and the arithmetic of what came out.

A machine drifts: other programs come and go, clocks rise and fall. So contestants take turns within a round, in a new
random order each, and what is told is the ratio to the base in the same round: its median, least and most. The base
takes part twice, as the A/A control: how far its second ratio is from 1 is what the machine makes of equal work.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Clock:
    """Times what happens between two marks, by a host's clock.

    Args:
        name: Name of the clock in records.
        now: Function that returns the current time in seconds.
    """

    def __init__(self, name: str, now: Callable[[], float]) -> None:
        self.name, self.now = name, now

    def settle(self) -> None:
        """Waits until earlier work is done; call it before the first mark."""

    def mark(self) -> Any:
        """Returns a point in time."""
        return self.now()

    def between(self, begin: Any, end: Any) -> float:
        """Returns the seconds from one mark to another."""
        return float(end - begin)

    def seconds(self, run: Callable[[], object], calls: int = 1) -> float:
        """Returns the seconds per call, the mean over ``calls`` calls in sequence."""
        self.settle()
        begin = self.mark()
        for _ in range(calls):
            run()
        return self.between(begin, self.mark()) / calls


#: With one thread this is the cost of a call, and other programs on the machine do not change it.
PROCESS = Clock("CPU time of one thread", time.process_time)
ELAPSED = Clock("elapsed time", time.perf_counter)


def pause(seconds: float) -> None:
    """Waits without computing, as for a distant server."""
    time.sleep(seconds)


class DeviceClock(Clock):
    """Clock with events on an accelerator's stream; waits for the device only when a time is read."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("events on the device", time.perf_counter)
        self.device = device

    def settle(self) -> None:
        import torch

        torch.accelerator.synchronize(self.device)

    def mark(self) -> torch.Event:
        import torch

        event = torch.Event(device=self.device, enable_timing=True)
        event.record()
        return event

    def between(self, begin: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class SettledClock(Clock):
    """Clock of elapsed time; each mark waits for the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("elapsed time", time.perf_counter)
        self.device = device

    def mark(self) -> float:
        if self.device.type != "cpu":
            import torch

            torch.accelerator.synchronize(self.device)
        return self.now()


class RanksClock(SettledClock):
    """A :class:`SettledClock` for several ranks, which begin together; all ranks must use it."""

    def settle(self) -> None:
        import torch.distributed as dist

        self.mark()
        dist.barrier()


def clock_of(device: torch.device) -> Clock:
    """Returns the clock for one process: CPU time, or the accelerator's events."""
    return PROCESS if device.type == "cpu" else DeviceClock(device)


def take_turns(
    runs: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warm_up: int = 1,
    order: random.Random | None = None,
    before_round: Callable[[int], object] = lambda number: None,
    may_fail: type[Exception] | tuple[()] = (),
) -> dict[str, list[T]]:
    """Calls every contestant once per round, each round in a new random order.

    Args:
        runs: Functions by name; each measures once and returns its result.
        rounds: Number of rounds that count.
        warm_up: Number of rounds before these, whose results are dropped; 0 if each contestant warms up by itself.
        order: Random generator of the orders; on several ranks, all need the same seed.
        before_round: Function that is called with each round's number from 0, including warm-up rounds.
        may_fail: Error of a contestant that ends its part in the comparison, such as one that does not fit the device.

    Returns:
        Results by name and round; empty lists for contestants that failed.
    """
    order, left = order or random.Random(), dict(runs)
    found: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(warm_up + rounds):
        before_round(number)
        for name in order.sample(list(left), len(left)):
            try:
                value = left[name]()
            except may_fail:
                del left[name]
                found[name].clear()
                continue
            if number >= warm_up:
                found[name].append(value)
    return found


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Returns each round's value over the base's in the same round."""
    return [value / other for value, other in zip(values, base, strict=True)]


def all_ratios(values: Mapping[str, Sequence[float]], base: str) -> dict[str, list[float]]:
    """Returns :func:`ratios` of every contestant to ``base``."""
    return {name: ratios(of_one, values[base]) for name, of_one in values.items()}


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of one contestant's ``n`` values."""

    median: float
    least: float
    most: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Returns the spread of a contestant's values, at least one."""
    return Spread(statistics.median(values), min(values), max(values), len(values))
