"""Plots of a schedule's timeline: one row for each rank, one box for each action."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_plugins.pipeline.actions import ActionKind
from dlo_plugins.pipeline.pipeline_schedules import Schedule
from dlo_plugins.pipeline.recorder import MeasuredCosts
from dlo_plugins.pipeline.simulation import Timeline, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours of a rank's first stage, and of its second one.
COLOURS = {
    ActionKind.FORWARD: ("#3f6ad8", "#8fa8ee"),
    ActionKind.BACKWARD: ("#a05195", "#d0a5ca"),
    ActionKind.INPUT: ("#2e8b57", "#86c9a3"),
    ActionKind.WEIGHT: ("#d9822b", "#f0bd8b"),
    ActionKind.RECOMPUTE: ("#7a8594", "#b3bac4"),
}
#: Names in the legend.
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "input gradient",
    ActionKind.WEIGHT: "weight gradient",
    ActionKind.RECOMPUTE: "recomputation",
}
_GREY = "#808080"
#: Fraction of the plot's width below which a box has no number.
_NARROW = 1 / 90


def draw_timeline(axes: Axes, timeline: Timeline, schedule: Schedule, unit: float = 1.0) -> None:
    """Draws a timeline.

    Args:
        axes: Axes of matplotlib.
        timeline: Timeline, simulated or measured.
        schedule: Schedule of the timeline.
        unit: Factor on all times: 1000 draws seconds as milliseconds.
    """
    width = max((item.end for row in timeline.rows for item in row), default=0.0) * unit
    for rank, row in enumerate(timeline.rows):
        own = schedule.placement.stages_of(rank)
        for item in row:
            kind, stage, number = item.action
            colours = COLOURS[kind]
            start, length = item.start * unit, (item.end - item.start) * unit
            colour = colours[min(own.index(stage), len(colours) - 1)]
            axes.barh(rank, length, 0.86, left=start, color=colour, edgecolor="white", linewidth=0.5)
            if length > _NARROW * width:
                axes.text(start + length / 2, rank, str(number), ha="center", va="center", fontsize=7, color="white")
    ranks = len(timeline.rows)
    axes.set(yticks=range(ranks), yticklabels=[f"rank {rank}" for rank in range(ranks)], xlim=(0, width))
    axes.invert_yaxis()
    axes.tick_params(length=0, colors=_GREY)
    for side in axes.spines.values():
        side.set_visible(False)


def simulate_ideal(timeline: Timeline, schedule: Schedule) -> Timeline:
    """Returns the timeline of a step whose ranks wait only for the schedule: its idle time is the bubble.

    Args:
        timeline: Measured timeline, which gives the cost of each action.
        schedule: Schedule of the timeline.
    """
    return simulate(schedule, MeasuredCosts.from_timeline(timeline))


def draw_comparison(timeline: Timeline, schedule: Schedule) -> Figure:
    """Returns a plot of a measured step above the same step with no other waits than the schedule's.

    Args:
        timeline: Measured timeline, in seconds.
        schedule: Schedule of the timeline.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = len(timeline.rows)
    figure = Figure(figsize=(10, 1.6 + 0.7 * ranks), layout="constrained")
    FigureCanvasAgg(figure)  # For this figure only, whatever backend the program's other figures use.
    upper, lower = figure.subplots(2, 1, sharex=True)
    theory = simulate_ideal(timeline, schedule)
    for axes, shown, title in ((upper, timeline, "as run"), (lower, theory, "by theory, from the same costs")):
        draw_timeline(axes, shown, schedule, unit=1000)
        axes.set_title(f"{title}: {shown.makespan * 1000:.0f} ms, bubble {shown.bubble:.1%}", fontsize=9, loc="left")
    end = max(item.end for part in (timeline, theory) for row in part.rows for item in row)
    upper.set_xlim(0, end * 1000)
    lower.set_xlabel("ms")
    kinds = {item.action.kind for row in timeline.rows for item in row}
    patches = [Patch(color=COLOURS[kind][0], label=name) for kind, name in NAMES.items() if kind in kinds]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=8)
    where = schedule.placement
    figure.suptitle(
        f"{schedule.name}: {where.ranks} ranks, {where.stages} stages, {schedule.micro_batches} micro-batches",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    return figure
