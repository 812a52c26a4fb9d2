"""Pictures of pruning: a metric over the sparsity, and the sparsity of the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_training(curve: Sequence[Mapping[str, Any]], layers: Mapping[str, float]) -> Figure:
    """Returns a figure of a run: the metric over the sparsity at each validation, and each layer's sparsity.

    Args:
        curve: Points with ``sparsity``, ``metric`` and ``value``, in the order of the run.
        layers: Fraction of each weight that is pruned at the end.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot([100 * point["sparsity"] for point in curve], [point["value"] for point in curve], "o-", markersize=3)
    left.set_xlabel("pruned weights, percent")
    left.set_ylabel(curve[-1]["metric"] if curve else "")
    left.set_title("validation while weights are pruned")
    names = list(layers)
    right.bar(range(len(names)), [100 * layers[name] for name in names])
    right.set_ylim(0, 100)
    right.set_ylabel("pruned, percent")
    right.set_title("layers at the end")
    shown = range(0, len(names), max(1, len(names) // 12))
    right.set_xticks(list(shown), [names[number].removesuffix(".weight") for number in shown], rotation=90, fontsize=6)
    return figure
