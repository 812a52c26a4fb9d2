"""Draws docs/images/progressive-resizing.svg from the schedules' functions; run it with ``python``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from dlo_framework.data import Position
from dlo_framework.progress import parse_position
from dlo_plugins.images.progressive_resizing import GrowingSize, StepSizes

FILE = Path(__file__).parents[1] / "images" / "progressive-resizing.svg"
EPOCHS, SAMPLES = 100, 1000
LAST = 224

START, MIDDLE, MOST, END = (parse_position(point, "picture") for point in (0, "50%", "80%", "100%"))
SCHEDULES = {
    'sizes: {0: 128, "50%": 160, "80%": 224}': ("#3f6ad8", StepSizes({START: 128, MIDDLE: 160, MOST: 224})),
    "start_size: 128": ("#d9822b", GrowingSize(128, LAST, MIDDLE, MOST, 16)),
    "start_size: 128, begin: 0, end: 100%, stages: 4": ("#2e8b57", GrowingSize(128, LAST, START, END, 16, 4)),
}


def main() -> None:
    """Draws the image size over a run (left), and the image area relative to the last size (right)."""
    places = [Position(epoch, part, SAMPLES) for epoch in range(EPOCHS) for part in range(0, SAMPLES, 100)]
    percent = [100 * at.epochs / EPOCHS for at in places]
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    plt.rcParams |= {"axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for name, (colour, schedule) in SCHEDULES.items():
        sizes = [schedule.size_at(at, EPOCHS) for at in places]
        area = [100 * (size / LAST) ** 2 for size in sizes]
        left.step(percent, sizes, where="post", color=colour, label=name)
        right.step(percent, area, where="post", color=colour, label=f"{sum(area) / len(area):.0f}% on average")
    left.set(title="size of the training images", ylabel="pixels", xlabel="samples seen, %", yticks=range(128, 240, 32))
    right.set(title="pixels per image, relative to the last size", ylabel="%", xlabel="samples seen, %", ylim=(0, 105))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    right.legend(frameon=False, loc="lower right")
    figure.patch.set_alpha(0)
    for axes in (left, right):
        axes.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
