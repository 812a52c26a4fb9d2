"""Draws docs/images/quantise.svg from the plug-in's functions: ``python docs/pictures/quantise.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

from dlo_plugins.quantise.callback import fitting_period, scheduled_bits
from dlo_plugins.quantise.schemes import affine_grid, fake_quantise, symmetric_grid

FILE = Path(__file__).parents[1] / "images" / "quantise.svg"
STEPS = 1000


def main() -> None:
    """Draws rounded values over the values, the error of a row, and the bits over the steps."""
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    plt.rcParams |= {"axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    row = torch.linspace(-1, 1, 640)[None]
    left.plot(row[0], fake_quantise(row, symmetric_grid(row, 8))[0], color="#3f6ad8", label="int8")
    left.plot(row[0], fake_quantise(row, affine_grid(row, 4, 640))[0], color="#d9822b", label="int4")
    left.set(xlabel="weight", title="rounded weight")
    left.legend(frameon=False)
    for start, colour in ((8, "#2e8b57"), (12, "#d9822b")):
        bits = [scheduled_bits(start, 4, fitting_period(start, 4, STEPS), step) for step in range(STEPS)]
        right.step(range(STEPS), bits, where="post", color=colour, label=f"start_bits {start}")
    right.set(xlabel="optimizer step after start", title="bits of a weight, int4_weights", ylim=(0, 13))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
