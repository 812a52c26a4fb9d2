"""Draws docs/images/dynamic-batch-size.svg from the plug-in's own functions; run it with ``python``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from dlo_framework.data import Position
from dlo_framework.progress import parse_position, value_at
from dlo_plugins.batches.dynamic_batch_size import LRDecay, grown_size, window

FILE = Path(__file__).parents[1] / "images" / "dynamic-batch-size.svg"
EPOCHS, SAMPLES, FIRST, LIMIT = 60, 1000, 64, 128
STEPS = {parse_position(point, "picture"): size for point, size in {0: 64, "50%": 128, "80%": 256}.items()}
DECAY = LRDecay(factor=0.5, at=["30%", "50%", "65%", "80%", "90%"], max_batch_size=512)


def main() -> None:
    """Draws the schedule with its micro-batches (left), and growth in place of decay (right)."""
    places = [Position(epoch, part, SAMPLES) for epoch in range(EPOCHS) for part in range(0, SAMPLES, 50)]
    percent = [100 * at.epochs / EPOCHS for at in places]
    sizes = [value_at(STEPS, at, EPOCHS) or FIRST for at in places]
    grown = [grown_size(DECAY, FIRST, at, EPOCHS) for at in places]
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    plt.rcParams |= {"axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    left.step(percent, sizes, where="post", color="#3f6ad8", label="batch size")
    micro = [window(size, LIMIT, 1).batch_size for size in sizes]
    left.step(percent, micro, where="post", color="#d9822b", linestyle="--", label=f"micro-batch, at most {LIMIT}")
    left.set(title='schedule: {0: 64, "50%": 128, "80%": 256}', ylabel="samples", xlabel="samples seen, %")
    left.legend(frameon=False)
    right.step(percent, [size for size, _ in grown], where="post", color="#3f6ad8", label="batch size")
    right.set(title="decay_to_growth: at most 512", ylabel="samples", xlabel="samples seen, %")
    rate = right.twinx()
    rate.step(percent, [left_over for _, left_over in grown], where="post", color="#2e8b57", label="lr factor")
    rate.set(ylim=(0, 1.05), ylabel="lr factor")
    lines = [*right.get_lines(), *rate.get_lines()]
    right.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="center left")
    figure.patch.set_alpha(0)
    for axes in (left, right, rate):
        axes.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
