"""Plot of a pipeline step: the measured timeline of each rank, above the one that the schedule alone would give."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from dlo_framework.callback import PluginCallback
from dlo_framework.errors import DloError
from dlo_framework.strategy_abilities import Pipelined
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.media import log_scalars, save_figure
from dlo_plugins.parallel.pipeline.pipeline_schedules import ActionKind, Schedule
from dlo_plugins.parallel.pipeline.simulation import MeasuredCosts, Timeline, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dlo_plugins.parallel.pipeline.pipeline_engine import Pipeline


class PipelineTimeline(PluginCallback):
    """Plots one measured step of a pipeline: the actions of each rank over time, and the time that ranks waited.

    The upper timeline is the measured step. The lower one has the same costs, but ranks wait only for the schedule. The
    plot goes to the loggers of images (`pipeline/timeline`) and to `pipeline.png` in the run's folder. The fraction of
    time that ranks waited goes to the loggers, as `pipeline/bubble` and `pipeline/bubble_of_theory`.

    Args:
        step: Number of the optimizer step to measure, from 0; the first steps are slow, as they allocate memory.

    Raises:
        DloError: If the step is negative, or the run has no pipeline (MeshStrategy with `pp` of 2 or more).
    """

    example = "{step: 2}"

    #: Why `dlo parity` trains without it: the one process of the comparison has no pipeline.
    left_out_of_parity = "it draws a run and changes nothing in it"

    def __init__(self, step: int = 5) -> None:
        if step < 0:
            raise DloError(f"PipelineTimeline: step must be the number of an optimizer step, from 0, got {step}; set 5")
        self.step = step
        self._recording = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that there is a pipeline."""
        _pipeline(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts to record at the step's first batch."""
        if trainer.global_step == self.step and not self._recording:
            self._recording = _pipeline(trainer).record = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Plots the recorded step."""
        pipeline = _pipeline(trainer)
        if not pipeline.record:
            return
        pipeline.record = False
        timeline = pipeline.timeline()  # A collective call of the pipeline's ranks.
        if trainer.is_global_zero:
            self._show(trainer, pipeline, timeline)

    def _show(self, trainer: Trainer, pipeline: Pipeline, timeline: Timeline) -> None:
        from dlo_plugins.parallel.pipeline.pipeline_schedules import make_schedule

        parts = len({item.action.micro_batch for row in timeline.rows for item in row if item.action.micro_batch >= 0})
        schedule = make_schedule(pipeline.schedule, pipeline.placement.ranks, parts, pipeline.stages_per_rank)
        theory = simulate_ideal(timeline, schedule)
        scalars = {"pipeline/bubble": timeline.bubble, "pipeline/bubble_of_theory": theory.bubble}
        log_scalars(trainer, scalars)
        path, draw = Path(trainer.default_root_dir) / "pipeline.png", partial(draw_comparison, timeline, schedule)
        saved = save_figure(trainer, "PipelineTimeline", "pipeline/timeline", path, draw)
        plotted = f"; plotted in {saved}" if saved is not None else ""
        rank_zero_info(
            f"pipeline: {schedule.name}, {parts} micro-batches: ranks waited {timeline.bubble:.1%} of step {self.step},"
            f" by theory {theory.bubble:.1%}{plotted}"
        )


def _pipeline(trainer: Trainer) -> Pipeline:
    pipeline: Pipeline = contract_of(trainer.strategy).ability(Pipelined, "PipelineTimeline").pipeline
    return pipeline


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
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = len(timeline.rows)
    figure = Figure(figsize=(10, 1.6 + 0.7 * ranks), layout="constrained")
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
