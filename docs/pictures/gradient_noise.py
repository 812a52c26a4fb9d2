"""Draws docs/images/gradient-noise.svg from the plug-in's functions: ``python docs/pictures/gradient_noise.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

from dlo_plugins.gradients.clipping_and_noise import add_noise_, noise_deviation

FILE = Path(__file__).parents[1] / "images" / "gradient-noise.svg"
ETAS = {1.0: "#2e8b57", 0.3: "#d9822b", 0.01: "#3f6ad8"}
STEPS, GAMMA = 1000, 0.55


def main() -> None:
    """Draws the standard deviation over the steps, and the noise of one gradient entry."""
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    plt.rcParams |= {"axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    for eta, colour in ETAS.items():
        left.loglog(
            range(1, STEPS),
            [noise_deviation(step, eta, GAMMA) for step in range(1, STEPS)],
            color=colour,
            label=f"eta {eta}",
        )
    left.set(xlabel="optimizer step", title="standard deviation of the noise")
    left.legend(frameon=False)
    drawn = []
    for step in range(STEPS):
        number = torch.zeros(1)
        add_noise_({"weight": number}, noise_deviation(step, 0.3, GAMMA), seed=0, step=step)
        drawn.append(float(number))
    bound = [2 * noise_deviation(step, 0.3, GAMMA) for step in range(STEPS)]
    right.plot(drawn, color="#d9822b", linewidth=0.6)
    right.fill_between(range(STEPS), [-value for value in bound], bound, color="#808080", alpha=0.2, linewidth=0)
    right.set(xlabel="optimizer step", title="noise of one gradient entry, eta 0.3", ylim=(-1.2, 1.2))
    for axes in (left, right):
        axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
