"""Draws docs/images/profile.svg from a benchmark's reports: ``python docs/pictures/step_profile.py``.

It is not named like its image: the standard library has a module of that name, which torch imports.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from dlo_plugins.profile.operations import KINDS
from dlo_plugins.profile.report import COLOURS

FILE = Path(__file__).parents[1] / "images" / "profile.svg"
REPORTS = Path(__file__).parents[2] / "benchmarks" / "results" / "step_profile_2026-11-24" / "reports.json"


def main() -> None:
    """Draws the shares of a step by kind."""
    reports = json.loads(REPORTS.read_text())
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    plt.rcParams |= {"axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"}
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.28 * len(reports)), layout="constrained")
    left = [0.0] * len(reports)
    rows = [report["ranks"][0] for report in reports.values()]
    for kind in KINDS:
        shares = [100 * row["kinds"][kind] / sum(row["kinds"].values()) for row in rows]
        if max(shares) > 0.05:
            axes.barh(range(len(rows)), shares, 0.8, left=left, color=COLOURS[kind], label=kind)
            left = [at + share for at, share in zip(left, shares, strict=True)]
    axes.set(yticks=range(len(rows)), yticklabels=list(reports), xlabel="percent of a step on rank 0", xlim=(0, 100))
    axes.invert_yaxis()
    axes.tick_params(length=0)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
