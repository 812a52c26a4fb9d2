"""Pictures of pruning: a metric over the sparsity, and the sparsity of the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_training(curve: Sequence[Mapping[str, Any]], layers: Mapping[str, float]) -> Figure:
    """Returns a figure of a run: the metric over the sparsity at each validation, and each layer's sparsity.

    Where the sparsity is always the same, as with a pattern, the metric is over the steps.

    Args:
        curve: Points with ``step``, ``sparsity``, ``metric`` and ``value``, in the order of the run.
        layers: Fraction of each weight that is pruned at the end.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    by_step = len({point["sparsity"] for point in curve}) == 1
    places = [point["step"] if by_step else 100 * point["sparsity"] for point in curve]
    left.plot(places, [point["value"] for point in curve], "o-", markersize=3)
    left.set_xlabel("step" if by_step else "pruned weights, percent")
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


def draw_tickets(points: Sequence[Mapping[str, Any]]) -> Figure:
    """Returns a figure of the rounds of `dlo ticket`: the metric over the kept weights, and the time that they took.

    Args:
        points: Results with ``kind`` (``ticket`` or ``reinit``), ``kept``, ``metric``, ``value`` and ``seconds``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, label in (("ticket", "rewound weights"), ("reinit", "new random weights")):
        own = [point for point in points if point["kind"] == kind and point["value"] is not None]
        if own:
            left.plot([100 * point["kept"] for point in own], [point["value"] for point in own], "o-", label=label)
    left.set_xscale("log")
    left.invert_xaxis()
    kept = sorted({100 * point["kept"] for point in points})
    left.set_xticks(kept, [f"{value:.3g}" for value in kept])
    left.minorticks_off()
    left.set_xlabel("kept weights, percent")
    left.set_ylabel(points[-1]["metric"] if points else "")
    left.set_title("how much?")
    if left.lines:
        left.legend()
    tickets = [point for point in points if point["kind"] == "ticket"]
    total = 0.0
    for point in tickets:
        right.bar(point["round"], point["seconds"], bottom=total, color="tab:blue")
        total += point["seconds"]
    right.set_xticks([point["round"] for point in tickets])
    right.set_xlabel("round")
    right.set_ylabel("seconds of training so far")
    right.set_title("what time does it cost?")
    return figure


def log_to_tensorboard(figure: Figure, folder: Path, tag: str, step: int) -> None:
    """Writes a figure as TensorBoard's event into a folder."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        writer.add_figure(tag, figure, global_step=step, close=False)
