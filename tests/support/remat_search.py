"""All persistent schedules of a short chain."""

import functools

from dlo_plugins.memory.schedule import Keep, Node, Recompute


@functools.cache
def all_nodes(modes: tuple[int, ...], first: int = 0) -> list[tuple[Node, ...]]:
    """Returns the nodes of all persistent schedules of stages, given the number of modes of each.

    Args:
        modes: Number of modes of each stage.
        first: Index of the first stage.
    """
    if not modes:
        return [()]
    found: list[tuple[Node, ...]] = []
    for rest in all_nodes(modes[1:], first + 1):
        found += [(Keep(first, mode), *rest) for mode in range(modes[0])]
    for length in range(1, len(modes)):
        rests = all_nodes(modes[length:], first + length)
        for inner in all_nodes(modes[:length], first):
            found += [(Recompute(first, first + length - 1, inner), *rest) for rest in rests]
    return found
