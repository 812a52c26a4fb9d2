"""Draws docs/images/frozen-model.svg: ``python docs/pictures/frozen_model.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

FILE = Path(__file__).parents[1] / "images" / "frozen-model.svg"
GREY, BLUE, ORANGE, GREEN = "#808080", "#3f6ad8", "#d9822b", "#2e8b57"
#: Sizes of Llama 3.1 8B: vocabulary, width, blocks, features of the MLP and of keys.
VOCABULARY, WIDTH, BLOCKS, INNER, KEYS = 128_256, 4096, 32, 14_336, 1024
RANKS = 4


def gigabytes_per_rank() -> dict[str, float]:
    """Returns the bytes of Llama 3.1 8B in bf16 on a rank of four, by where its parameters are."""
    block = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * INNER + 2 * WIDTH
    outside = 2 * VOCABULARY * WIDTH + WIDTH
    total = outside + BLOCKS * block
    return {
        "full: one process, ddp,\nzero1, zero2": 2e-9 * total,
        f"a shard: zero3, fsdp,\nmesh of {RANKS} ranks": 2e-9 * total / RANKS,
        "offload: true\n(outside of blocks, two blocks)": 2e-9 * (outside + 2 * block),
    }


def box(axes: Any, x: float, y: float, text: str, colour: str, width: float = 2.7, height: float = 0.9) -> None:
    """Draws a box around a text; x and y are its middle."""
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(plt.Rectangle(corner, width, height, fill=False, edgecolor=colour, linewidth=1.4))
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draws an arrow."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": GREY, "linewidth": 1.1})


def main() -> None:
    """Draws the way of a batch through both models, and the second model's bytes on a rank."""
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": GREY, "axes.labelcolor": GREY}
    plt.rcParams |= {"axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", width_ratios=[1.35, 1])
    box(left, 1.5, 4.2, "checkpoint, task,\nor average", GREY)
    box(left, 5, 4.2, "second model, frozen,\nsharded as the first", BLUE)
    box(left, 8.5, 4.2, "outputs", BLUE)
    box(left, 1.5, 1.2, "batch", GREY)
    box(left, 5, 1.2, "model that trains", ORANGE)
    box(left, 8.5, 1.2, "loss", GREEN)
    for start, end in (
        ((2.8, 4.2), (3.7, 4.2)),
        ((6.3, 4.2), (7.2, 4.2)),
        ((2.8, 1.2), (3.7, 1.2)),
        ((6.3, 1.2), (7.2, 1.2)),
        ((2.0, 1.65), (4.4, 3.75)),
        ((8.5, 3.75), (8.5, 1.65)),
    ):
        arrow(left, start, end)
    left.text(5, 0.25, "checkpoints, exports and the optimizer have this model alone", ha="center", fontsize=7)
    left.set(xlim=(0, 10), ylim=(0, 5))
    left.set_axis_off()
    sizes = gigabytes_per_rank()
    places = list(range(len(sizes)))[::-1]
    right.barh(places, list(sizes.values()), height=0.55, color=[GREY, BLUE, GREEN])
    for place, size in zip(places, sizes.values(), strict=True):
        right.text(size + 0.2, place, f"{size:.1f} GB", va="center", fontsize=7.5)
    right.set_yticks(places, list(sizes), fontsize=7.5)
    right.set(title=f"Llama 3.1 8B in bf16, on one of {RANKS} devices", xlim=(0, 20), xlabel="GB of parameters")
    right.title.set_fontsize(8.5)
    for side in ("top", "right"):
        right.spines[side].set_visible(False)
    right.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
