"""Draws docs/images/adaptive-gradient-clipping.svg: ``python docs/pictures/adaptive_gradient_clipping.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

from dlo_plugins.gradients.clipping_and_noise import agc_scales, unit_norms

FILE = Path(__file__).parents[1] / "images" / "adaptive-gradient-clipping.svg"
FACTORS = {0.01: "#3f6ad8", 0.04: "#d9822b", 0.16: "#2e8b57"}
EPS = 1e-3


def main() -> None:
    """Draws clipped gradient norms: over the ratio of norms (left), and for the units of a layer (right)."""
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    plt.rcParams |= {"axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    ratios = torch.logspace(-3, 0, 200)[:, None]  # [units, 1]: weights of 1, gradients of these sizes
    for factor, colour in FACTORS.items():
        scale = agc_scales([torch.ones_like(ratios)], [ratios], factor, EPS)[0]
        left.loglog(ratios.flatten(), (ratios * scale).flatten(), color=colour, label=f"clip_factor {factor}")
    left.set(xlabel="|gradient| / |weights| of a unit", ylabel="after clipping", title="clipped norm")
    left.legend(frameon=False)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(24, 64, generator=generator) * torch.linspace(0.02, 0.2, 24)[:, None]
    gradients = (
        torch.randn(24, 64, generator=generator) * 10 ** torch.linspace(-3.5, -1, 24)[torch.randperm(24)][:, None]
    )
    scale = agc_scales([weights], [gradients], 0.04, EPS)[0]
    units = range(24)
    right.bar(units, unit_norms(gradients).flatten(), color="#d0d0d0", label="gradient")
    right.bar(units, unit_norms(gradients * scale).flatten(), color="#3f6ad8", label="clipped")
    limit = 0.04 * unit_norms(weights).flatten()
    right.step([*units, 24], [*limit, limit[-1]], where="mid", color="#d9822b", label="0.04 |weights|")
    right.set(yscale="log", xlabel="unit of a layer", title="units of one layer", xlim=(-0.7, 23.7), ylim=(2e-3, 30))
    right.legend(frameon=False, loc="upper left", fontsize=8)
    for axes in (left, right):
        axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
