"""Chains of activations of known models, from formulas: bytes in float32, seconds on a V100."""

from __future__ import annotations

from collections.abc import Callable

from dlo_plugins.remat.chain import Chain, Mode, Stage

FLOPS, BANDWIDTH = 12e12, 700e9  # What matrix products, and memory, reach in float32.


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
