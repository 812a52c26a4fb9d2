"""Schedules that treat all blocks alike: full, every nth, segments, and selective recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from dlo_plugins.memory.schedule import Chain, Keep, Node, Recompute, Schedule, predict


def uniform_schedules(chain: Chain) -> Iterator[Schedule]:
    """Yields the schedules that recompute every nth block, all but every nth, or segments of n blocks, for all n."""
    blocks = len(chain) - 1
    for count in range(1, blocks + 1):
        for nodes in (
            [_region(index, index) if index % count == 0 else Keep(index) for index in range(blocks)],
            [Keep(index) if index % count == 0 else _region(index, index) for index in range(blocks)],
            [_region(index, min(index + count, blocks) - 1) for index in range(0, blocks, count)],
        ):
            yield predict(chain, [*nodes, Keep(blocks)])


def selective_schedules(chain: Chain) -> Iterator[Schedule]:
    """Yields the schedules in which every nth block, or all but every nth, recomputes selectively, where it can."""
    blocks = len(chain) - 1
    modes = [len(stage.modes) - 1 for stage in chain.stages]
    for count in range(1, blocks + 1):
        yield predict(chain, [Keep(n, modes[n] if n % count == 0 else 0) for n in range(blocks + 1)])
        yield predict(chain, [Keep(n, modes[n] if n % count else 0) for n in range(blocks + 1)])


def _region(first: int, last: int) -> Node:
    return Recompute(first, last, tuple(Keep(index) for index in range(first, last + 1)))
