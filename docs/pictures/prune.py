"""Draws docs/images/prune.svg from a benchmark's results: ``python docs/pictures/prune.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

FILE = Path(__file__).parents[1] / "images" / "prune.svg"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "pruning_2026-11-24.md"
COLOURS = {"ticket": "#3f6ad8", "new weights": "#d9822b"}


def read_rows() -> dict[str, dict[str, float]]:
    """Returns mean and standard error of the rows of the results' tables."""
    found = {}
    for line in RESULTS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) >= 6 and re.fullmatch(r"[\d.]+", cells[1]) and re.fullmatch(r"[\d.]+", cells[5]):
            found.setdefault(cells[0], {"mean": float(cells[4]), "standard error": float(cells[5])})
    return found


def points(rows: dict[str, Any], label: str) -> list[tuple[float, float, float]]:
    """Returns kept percent, mean and standard error of the rows of a label, the dense one first."""
    found = []
    for name, row in rows.items():
        kept = re.match(r"(\d+)% kept, (.*)", name)
        if kept and kept[2] in (label, "dense"):
            found.append((float(kept[1]), row["mean"], row["standard error"]))
    return found


def main() -> None:
    """Draws the accuracy of tickets over the kept weights, and of gradual pruning over the pruned weights."""
    rows = read_rows()
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    plt.rcParams |= {"axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    for label, colour in COLOURS.items():
        own = points(rows, label)
        left.errorbar(
            [kept for kept, _, _ in own],
            [100 * mean for _, mean, _ in own],
            [100 * error for _, _, error in own],
            color=colour,
            label=label,
            marker="o",
            markersize=3,
            capsize=2,
        )
    left.set_xscale("log")
    left.invert_xaxis()
    left.set_xticks([100, 67, 45, 30, 20], ["100", "67", "45", "30", "20"])
    left.minorticks_off()
    left.set(xlabel="kept weights, percent", title="tickets: held-out accuracy, percent")
    left.legend(frameon=False)
    gradual = [(float(name[:2]), row) for name, row in rows.items() if re.fullmatch(r"\d+% pruned", name)]
    shown = [(0.0, rows["dense"]), *gradual]
    right.errorbar(
        [amount for amount, _ in shown],
        [100 * row["mean"] for _, row in shown],
        [100 * row["standard error"] for _, row in shown],
        color="#2e8b57",
        marker="o",
        markersize=3,
        capsize=2,
        label="gradual",
    )
    two = rows["2:4, SR-STE"]
    right.errorbar(
        [50],
        [100 * two["mean"]],
        [100 * two["standard error"]],
        color="#3f6ad8",
        marker="s",
        markersize=4,
        capsize=2,
        linestyle="none",
        label="2:4",
    )
    right.set(xlabel="pruned weights, percent", title="one run: held-out accuracy, percent")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
