"""Picture of a schedule: what is kept and recomputed over the time of a step, and the memory that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.schedule import OperationKind, Schedule
from dlo_plugins.remat.schedule_simulation import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"forward": "#4c78a8", "kept": "#72b7b2", "again": "#f58518", "backward": "#b279a2"}
_LABELS = {
    "forward": "forward, nothing kept",
    "kept": "forward, activations kept",
    "again": "forward again",
    "backward": "backward",
}


def draw_schedule(chain: Chain, schedule: Schedule, stem: int = 0, budget: int | None = None) -> Figure:
    """Returns a figure of a schedule: the operations of each stage over time, and the memory over time.

    Args:
        chain: Chain that the schedule is of.
        schedule: Schedule.
        stem: Bytes that the step keeps beside the chain.
        budget: Budget in bytes, with the stem; None draws no line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    found = simulate(chain, schedule)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    scale = 1e3
    for item in found.operations:
        kind = _kind(item.operation.kind, item.operation.run)
        width = max(item.end - item.start, 1e-12) * scale
        upper.barh(item.operation.stage, width, left=item.start * scale, height=0.85, color=_COLORS[kind])
    upper.set_ylim(len(chain) - 0.4, -0.6)
    upper.set_ylabel("stage")
    upper.legend(
        handles=[Patch(color=_COLORS[kind], label=label) for kind, label in _LABELS.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.13),
        ncols=4,
        frameon=False,
    )
    edges = [item.start * scale for item in found.operations] + [found.time * scale]
    lower.stairs([(item.peak + stem) / 1e6 for item in found.operations], edges, fill=True, color="#9ecae9")
    if budget is not None:
        lower.axhline(budget / 1e6, color="#e45756", linestyle="--", label="budget")
        lower.legend(frameon=False)
    lower.set_xlabel("time of forward and backward (ms)")
    lower.set_ylabel("activations (MB)")
    return figure


def _kind(kind: OperationKind, run: int) -> str:
    if kind is OperationKind.BACKWARD:
        return "backward"
    if run > 0:
        return "again"
    return "kept" if kind is OperationKind.SAVE else "forward"
