"""A picture of a schedule: a row a rank, a box an action, in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_plugins.pipeline.actions import Kind
from dlo_plugins.pipeline.schedules import Schedule
from dlo_plugins.pipeline.simulate import Timeline, simulate
from dlo_plugins.pipeline.spans import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Of the first stage of a rank, and of its second one.
COLOURS = {
    Kind.FORWARD: ("#3f6ad8", "#8fa8ee"),
    Kind.BACKWARD: ("#a05195", "#d0a5ca"),
    Kind.INPUT: ("#2e8b57", "#86c9a3"),
    Kind.WEIGHT: ("#d9822b", "#f0bd8b"),
}
#: What the legend calls each.
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
}
_GREY = "#808080"
#: Boxes narrower than this part of the picture have no number.
_NARROW = 1 / 90


def draw(axes: Axes, timeline: Timeline, schedule: Schedule, unit: float = 1.0) -> None:
    """Draws what each rank does when.

    Args:
        axes: of matplotlib.
        timeline: as simulated or as measured.
        schedule: that it is of.
        unit: by which times are multiplied: 1000 draws seconds as milliseconds.
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


def ideal(timeline: Timeline, schedule: Schedule) -> Timeline:
    """Returns the step that would be if nothing but the schedule made ranks wait: its idle time is the bubble.

    Args:
        timeline: as measured.
        schedule: that was run.
    """
    return simulate(schedule, Measured.of_step(timeline))


def as_run(timeline: Timeline, schedule: Schedule) -> Figure:
    """Returns the picture of a step as measured above the same as it would be if nothing but the schedule made it wait.

    Args:
        timeline: as measured, in seconds.
        schedule: that was run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = len(timeline.rows)
    figure = Figure(figsize=(10, 1.6 + 0.7 * ranks), layout="constrained")
    FigureCanvasAgg(figure)  # For this figure alone, whatever the program's others are drawn with.
    upper, lower = figure.subplots(2, 1, sharex=True)
    theory = ideal(timeline, schedule)
    for axes, shown, title in ((upper, timeline, "as run"), (lower, theory, "by theory, from the same costs")):
        draw(axes, shown, schedule, unit=1000)
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
