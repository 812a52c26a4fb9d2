"""Random chains, their schedules, and memory by the definitions of Rotor's paper."""

import functools
import random

from dlo_plugins.memory.schedule import Chain, Keep, Mode, Node, Recompute, Stage


def random_chain(rng: random.Random, length: int, modes: int = 1, loss: bool = True) -> Chain:
    """Returns a chain with small whole sizes and times; zero sizes are among them.

    Args:
        rng: Random numbers.
        length: Number of stages.
        modes: Largest number of modes of a stage.
        loss: Whether the last stage's output is a loss of 0 bytes.
    """
    stages = []
    for index in range(length):
        output = 0 if loss and index == length - 1 else rng.randint(0, 4)
        forward, backward = rng.randint(1, 9), rng.randint(1, 9)
        ways = [Mode("all", output + rng.randint(0, 6), forward, backward, rng.randint(0, 1), rng.randint(0, 1))]
        for number in range(rng.randint(1, modes) - 1):
            saved = output + rng.randint(0, 4)
            again = backward + rng.randint(0, forward)
            ways.append(Mode(f"selective{number}", saved, forward, again, rng.randint(0, 2), rng.randint(0, 3)))
        stages.append(Stage(f"s{index}", output, tuple(ways), forward_peak=rng.randint(0, 3)))
    return Chain(tuple(stages), input=rng.randint(0, 4))


def equal_chain(length: int, mode: Mode, output: int, head: Mode | None = None, forward_peak: int = 0) -> Chain:
    """Returns a chain of equal blocks and a head whose output is a loss of 0 bytes."""
    blocks = [Stage(f"block{index}", output, (mode,), forward_peak) for index in range(length)]
    head = head or Mode("all", 0, mode.forward, mode.backward)
    return Chain((*blocks, Stage("head", 0, (head,))), input=output)


def random_nodes(rng: random.Random, chain: Chain, first: int = 0, last: int | None = None) -> tuple[Node, ...]:
    """Returns random nodes of a schedule without copies."""
    last = len(chain) - 1 if last is None else last
    nodes: list[Node] = []
    while first < last:
        end = rng.randint(first, last - 1)
        if rng.random() < 0.5:
            nodes.append(Recompute(first, end, random_nodes(rng, chain, first, end)))
            first = end + 1
        else:
            nodes.append(Keep(first, rng.randrange(len(chain.stages[first].modes))))
            first += 1
    return (*nodes, Keep(last, rng.randrange(len(chain.stages[last].modes))))


def time_and_peak(chain: Chain, nodes: tuple[Node, ...]) -> tuple[float, int]:
    """Returns time and peak of a schedule without copies, by the paper's operations on sets of its objects.

    The objects are `("a", l)`, the output of stage `l` counted from 1, and `("b", l, mode)`, all that stage `l` keeps.
    """
    stored: set[tuple] = {("a", 0)}
    now = {"gradient": len(chain), "time": 0.0, "peak": 0}

    def bytes_of(item: tuple) -> int:
        if item[0] == "a":
            return chain.input_of(item[1]) if item[1] < len(chain) else chain.stages[-1].output
        return chain.stages[item[1] - 1].modes[item[2]].saved

    def in_use() -> int:
        return sum(map(bytes_of, stored)) + bytes_of(("a", now["gradient"]))

    def peak(extra: int) -> None:
        now["peak"] = max(now["peak"], in_use() + extra)

    def check_input(stage: int) -> None:
        assert ("a", stage - 1) in stored or any(item[:2] == ("b", stage - 1) for item in stored)

    def forward(node: Node) -> None:
        if isinstance(node, Keep):
            mode, stage = chain.stages[node.stage].modes[node.mode], node.stage + 1
            check_input(stage)
            peak(mode.saved + mode.forward_peak)
            stored.add(("b", stage, node.mode))
            now["time"] += mode.forward
            return
        for stage in range(node.first + 1, node.last + 2):
            check_input(stage)
            here = chain.stages[stage - 1]
            peak(here.output + here.forward_peak)
            stored.add(("a", stage))
            if stage > node.first + 1:
                stored.discard(("a", stage - 1))
            now["time"] += here.modes[0].forward

    def backward(node: Node) -> None:
        if isinstance(node, Recompute):
            run(node.inner)
            return
        mode, stage = chain.stages[node.stage].modes[node.mode], node.stage + 1
        check_input(stage)
        assert ("b", stage, node.mode) in stored
        assert now["gradient"] == stage
        peak(bytes_of(("a", stage - 1)) + mode.backward_peak)
        stored.difference_update({("b", stage, node.mode), ("a", stage), ("a", stage - 1)})
        now["time"] += mode.backward
        now["gradient"] = stage - 1

    def run(sequence: tuple[Node, ...]) -> None:
        for node in sequence:
            forward(node)
        for node in reversed(sequence):
            backward(node)

    run(nodes)
    assert now["gradient"] == 0
    assert not stored
    return now["time"], now["peak"]


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
