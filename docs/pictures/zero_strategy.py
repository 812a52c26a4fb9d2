"""Draws docs/images/zero-strategy.svg from the partition's own functions; run it with ``python``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from dlo_framework.watch.state_bytes import paper_bytes
from dlo_plugins.parallel.flat_slices import FlatPartition

FILE = Path(__file__).parents[1] / "images" / "zero-strategy.svg"
RANKS = 4
LAYERS = {"a": 5, "b": 8, "c": 4, "d": 7}
COLOURS = {"a": "#3f6ad8", "b": "#d9822b", "c": "#2e8b57", "d": "#a05195"}
ROWS = (("parameters", 3), ("gradients", 2), ("optimizer", 1))
GREY = "#808080"


def main() -> None:
    """Draws each rank's shards of four layers per stage (top), and the bytes per rank (bottom)."""
    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": GREY, "axes.labelcolor": GREY}
    plt.rcParams |= {"axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY}
    figure, (holds, bytes_of) = plt.subplots(2, 1, figsize=(8, 5.4), height_ratios=(3, 2), layout="constrained")
    partition = FlatPartition(tuple(LAYERS.values()), RANKS)
    names, total = list(LAYERS), sum(LAYERS.values())
    for stage in range(4):
        for row, (_, divided_from) in enumerate(ROWS):
            for rank in range(RANKS):
                left, top = stage * (RANKS + 1) + rank, -row * 1.1
                # One column per rank: its slices of the flat buffer, bottom to top.
                pieces = [p for r in (range(RANKS) if stage < divided_from else [rank]) for p in partition.pieces(r)]
                for piece in pieces:
                    start = (partition.starts[piece.parameter] + piece.start) / total
                    holds.bar(left, piece.length / total, 0.9, top + start, color=COLOURS[names[piece.parameter]])
                holds.add_patch(plt.Rectangle((left - 0.45, top), 0.9, 1, fill=False, edgecolor=GREY, linewidth=0.5))
    holds.set(
        title=f"shards of the layers a, b, c, d on {RANKS} ranks",
        xticks=[stage * (RANKS + 1) + 1.5 for stage in range(4)],
        yticks=[0.5 - row * 1.1 for row in range(3)],
    )
    holds.set_xticklabels(["ddp", "zero1", "zero2", "zero3"])
    holds.set_yticklabels([name for name, _ in ROWS])
    holds.tick_params(length=0)
    for side in holds.spines.values():
        side.set_visible(False)
    ranks = [2**power for power in range(11)]
    for stage, colour in enumerate((GREY, "#3f6ad8", "#d9822b", "#2e8b57")):
        parts = [paper_bytes(1, count, stage) for count in ranks]
        per_rank = [part.parameters + part.gradients + part.optimizer for part in parts]
        bytes_of.plot(ranks, per_rank, color=colour, label=f"zero{stage}" if stage else "ddp")
    bytes_of.set_xscale("log", base=2)
    bytes_of.set(
        xlabel="ranks", ylabel="bytes per parameter", title="state per rank, single precision, Adam", ylim=(0, 17)
    )
    bytes_of.legend(frameon=False, ncols=4)
    figure.patch.set_alpha(0)
    for axes in (holds, bytes_of):
        axes.patch.set_alpha(0)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
