"""Draws docs/images/attention.svg from the core's patterns: ``python docs/pictures/attention.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from dlo_framework.models.attention import (
    AttentionMask,
    BigBird,
    BSLongformer,
    DenseSparsity,
    FixedSparsity,
    Prefix,
    SlidingWindow,
    SparsityPattern,
    VariableSparsity,
)

FILE = Path(__file__).parents[1] / "images" / "attention.svg"
BLOCK, LENGTH = 4, 64
PATTERNS: dict[str, SparsityPattern] = {
    "DenseSparsity": DenseSparsity(BLOCK),
    "FixedSparsity": FixedSparsity(BLOCK),
    "VariableSparsity": VariableSparsity(BLOCK, num_random_blocks=1, local_window_blocks=[1, 2, 4]),
    "BSLongformer": BSLongformer(BLOCK),
    "BigBird": BigBird(BLOCK),
    "SlidingWindow": SlidingWindow(10, BLOCK),
    "Prefix": Prefix(14, BLOCK),
}


def main() -> None:
    """Draws each pattern for a causal model above the same for both directions, and a causal one with documents."""
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 8, "text.color": "#808080", "axes.labelcolor": "#808080"}
    figure, axes = plt.subplots(2, len(PATTERNS), figsize=(11, 3.4), layout="constrained")
    places = torch.arange(LENGTH)
    documents = (places >= 26).int() + (places >= 45).int()
    for number, (name, pattern) in enumerate(PATTERNS.items()):
        for row, causal in enumerate((True, False)):
            cell = axes[row, number]
            seen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
            title = name if causal else ""
            if causal or not pattern.prefix:
                seen = AttentionMask(pattern, causal=causal, num_heads=1).visible(places, places)[0]
            else:  # A prefix is for causal models: its second picture has documents.
                same = documents[:, None] == documents[None]
                seen = AttentionMask(BSLongformer(BLOCK), causal=True, num_heads=1).visible(places, places)[0] & same
                title = "BSLongformer,\nthree documents"
            cell.imshow(seen, cmap=ListedColormap(["#80808020", "#3f6ad8"]), vmin=0, vmax=1, interpolation="nearest")
            cell.set_title(title, fontsize=8)
            cell.set_xticks([])
            cell.set_yticks([])
            for spine in cell.spines.values():
                spine.set_color("#808080")
    axes[0, 0].set_ylabel("causal: queries")
    axes[1, 0].set_ylabel("both directions")
    figure.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
