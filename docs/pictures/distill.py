"""Draws docs/images/distill.svg from the plug-in's functions: ``python docs/pictures/distill.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

from dlo_framework.distillation import logit_losses
from dlo_plugins.distill.student_losses import LogitDistance

FILE = Path(__file__).parents[1] / "images" / "distill.svg"
#: A teacher's logits for an image of a 4 that looks like a 9.
TEACHER = torch.tensor([[-1.0, 0.5, 0.0, -0.5, 8.0, 0.0, -1.0, 2.0, 1.0, 5.0]])
TEMPERATURES = {1.0: "#3f6ad8", 4.0: "#d9822b"}
LOSSES = {"kl": "#3f6ad8", "reverse_kl": "#d9822b", "jsd": "#2e8b57", "wasserstein": "#8a63d2"}


def main() -> None:
    """Draws the teacher's probabilities at two temperatures, and the distances of a student between two teachers."""
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    plt.rcParams |= {"axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    for number, (temperature, colour) in enumerate(TEMPERATURES.items()):
        heights = torch.softmax(TEACHER[0] / temperature, 0).tolist()
        places = [place + 0.4 * number - 0.2 for place in range(10)]
        left.bar(places, heights, width=0.4, color=colour, label=f"temperature {temperature:g}")
    left.set(xlabel="class", title="the teacher's probabilities", xticks=range(10))
    left.legend(frameon=False)
    shares = torch.linspace(0.005, 0.995, 199)
    teacher = torch.tensor([[0.7, 0.3]]).log().expand(len(shares), -1)
    student = torch.stack([shares, 1 - shares], 1).log()
    for name, colour in LOSSES.items():
        right.plot(shares, logit_losses(LogitDistance(name), student, teacher), color=colour, label=name)  # type: ignore[arg-type]
    right.set(xlabel="student's probability; the teacher's is 0.7", title="distances", ylim=(0, 1.5))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
