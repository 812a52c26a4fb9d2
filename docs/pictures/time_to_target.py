"""Draws docs/images/time-to-target.svg from a run's evaluations: ``python docs/pictures/time_to_target.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from dlo_plugins.profile.time_to_target import reaches

FILE = Path(__file__).parents[1] / "images" / "time-to-target.svg"
TARGET = 0.97
SAMPLES = 1408  # per epoch
#: val_acc1 after each epoch of `dlo fit --config digits/time_to_target`.
ACCURACY = [
    0.1616,
    0.2897,
    0.337,
    0.2813,
    0.4123,
    0.4345,
    0.507,
    0.5348,
    0.5822,
    0.5265,
    0.7354,
    0.7214,
    0.8524,
    0.844,
    0.8663,
    0.8802,
    0.9081,
    0.8969,
    0.8914,
    0.922,
    0.9415,
    0.9526,
    0.9109,
    0.9331,
    0.9109,
    0.9331,
    0.9526,
    0.9471,
    0.9499,
    0.9192,
    0.9582,
    0.9554,
    0.9554,
    0.9666,
    0.9721,
]


def main() -> None:
    """Draws the metric over samples, the target, and the point where the run stops."""
    evaluations = [{"value": value, "samples": SAMPLES * (epoch + 1)} for epoch, value in enumerate(ACCURACY)]
    reached = next(one for one in evaluations if reaches(one["value"], TARGET, "max"))
    assert reached is not None
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    plt.rcParams |= {"axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"}
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    thousands = [one["samples"] / 1000 for one in evaluations]
    axes.plot(thousands, [one["value"] for one in evaluations], color="#3f6ad8", label="val_acc1")
    axes.axhline(TARGET, color="#808080", linewidth=0.8, linestyle="--", label=f"target {TARGET}")
    at = reached["samples"] / 1000
    axes.plot([at], [reached["value"]], "o", color="#d9822b", label=f"stops: {reached['samples']:,} samples")
    axes.set(xlabel="thousand samples", ylabel="validation accuracy", xlim=(0, 60 * SAMPLES / 1000))
    axes.axvspan(at, 60 * SAMPLES / 1000, color="#808080", alpha=0.12, label="not run, of 60 epochs")
    axes.legend(frameon=False, loc="lower right")
    axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
