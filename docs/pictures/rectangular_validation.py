"""Draws docs/images/rectangular-validation.svg from the data's own function; run it with ``python``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from dlo_tasks.imagenet.rectangles import rectangle

FILE = Path(__file__).parents[1] / "images" / "rectangular-validation.svg"
SIZE, MULTIPLE, CROP = 224, 16, 0.875
SHAPES = [(375, 500), (500, 333), (400, 400), (300, 640)]  # height, width


def main() -> None:
    """Draws the area that a square crop and a rectangle cover in images of several shapes."""
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080"}
    widths = [width / min(height, width) for height, width in SHAPES]
    figure, panels = plt.subplots(1, 4, figsize=(8, 2.6), layout="constrained", width_ratios=widths)
    for axes, (height, width) in zip(panels, SHAPES, strict=True):
        shorter = SIZE / CROP  # size of the shorter side after resizing
        rows, columns = (shorter * side / min(height, width) for side in (height, width))
        axes.add_patch(Rectangle((0, 0), columns, rows, facecolor="#80808030", edgecolor="#808080"))
        shown = rectangle(height, width, SIZE, MULTIPLE, 2.0)
        for (high, wide), colour, style in (((SIZE, SIZE), "#d9822b", "--"), (shown, "#3f6ad8", "-")):
            corner = ((columns - wide) / 2, (rows - high) / 2)
            axes.add_patch(Rectangle(corner, wide, high, fill=False, edgecolor=colour, linestyle=style, linewidth=2))
        axes.set(xlim=(-4, columns + 4), ylim=(rows + 4, -4), aspect="equal")
        axes.set_title(f"{width} x {height}\nto {shown[1]} x {shown[0]}")
        axes.axis("off")
    handles = [
        plt.Line2D([], [], color="#d9822b", linestyle="--", label="square"),
        plt.Line2D([], [], color="#3f6ad8", label="rectangle, multiple of 16"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
