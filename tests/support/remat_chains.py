"""Random chains, chains of known models, random schedules, and memory by the definitions of Rotor's paper."""

import random
from collections.abc import Callable

from dlo_plugins.remat.chain import Chain, Mode, Stage
from dlo_plugins.remat.schedule import Keep, Node, Recompute


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


# --- chains of known models: bytes in float32, seconds on a V100 ---

#: FLOP/s of matrix products, and bytes a second of memory, that a V100 reaches in float32.
FLOPS, BANDWIDTH = 12e12, 700e9


def vit_chain(blocks: int = 24) -> Chain:
    """Returns the blocks of ViT-L/16 at 224, 64 images, with plain attention."""
    tokens, width = 64 * 197, 1024
    unit = 4 * tokens * width
    attention = 4 * 64 * 16 * 197 * 197
    seconds = tokens * (24 * width * width + 4 * 197 * width) / FLOPS
    full = Mode("all", 16 * unit + 2 * attention, seconds, 2 * seconds)
    selective = Mode("selective", 12 * unit, seconds, 2.06 * seconds, backward_peak=2 * attention)
    block = Stage("block", unit, (full, selective), forward_peak=5 * unit)
    head = Stage("head", 0, (Mode("all", unit, seconds / 50, seconds / 25),))
    return Chain((block,) * blocks + (head,), input=unit)


def resnet_chain() -> Chain:
    """Returns the bottleneck blocks of ResNet-50 at 224, 128 images."""
    stages: list[Stage] = []
    channels = 64
    for number, (blocks, width, size) in enumerate(((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))):
        for index in range(blocks):
            first = index == 0
            wide = size * (2 if first and number else 1)  # The first block of a stage halves the image.
            pixels, before = size * size, wide * wide
            flops = 2 * (before * channels * width + pixels * 9 * width * width + pixels * 4 * width * width)
            flops += 2 * pixels * channels * 4 * width * first
            # Inputs of three convolutions, norms and activations, and the shortcut's.
            kept = 2 * (before + pixels) * width + pixels * 4 * width * (2 + first)
            output = 128 * 4 * pixels * 4 * width
            seconds = 128 * flops / FLOPS + 2 * 128 * 4 * kept / BANDWIDTH
            saved = 128 * 4 * kept + output
            mode = Mode("all", saved, seconds, 2 * seconds, backward_peak=output)
            stages.append(Stage(f"layer{number + 1}.{index}", output, (mode,), forward_peak=output))
            channels = 4 * width
    head = Stage("head", 0, (Mode("all", 128 * 4 * 2048, 1e-4, 2e-4),))
    return Chain((*stages, head), input=128 * 4 * 64 * 56 * 56)


CHAINS: dict[str, Callable[[], Chain]] = {"vit": vit_chain, "resnet": resnet_chain}
