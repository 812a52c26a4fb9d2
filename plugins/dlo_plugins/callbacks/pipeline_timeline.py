"""Plot of a pipeline step: the measured timeline of each rank, above the one that the schedule alone would give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from dlo_framework.errors import DloError
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.media import draw_figure, log_figure

if TYPE_CHECKING:
    from dlo_plugins.pipeline.pipeline_engine import Pipeline
    from dlo_plugins.pipeline.simulation import Timeline


class PipelineTimeline(Callback):
    """Plots one measured step of a pipeline: the actions of each rank over time, and the time that ranks waited.

    The upper timeline is the measured step. The lower one has the same costs, but ranks wait only for the schedule. The
    plot goes to the loggers of images (`pipeline/timeline`) and to `pipeline.png` in the run's folder. The fraction of
    time that ranks waited goes to the loggers, as `pipeline/bubble` and `pipeline/bubble_of_theory`.

    Args:
        step: Number of the optimizer step to measure, from 0; the first steps are slow, as they allocate memory.

    Raises:
        DloError: If the step is negative, or the run has no pipeline (MeshStrategy with `pp` of 2 or more).
    """

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

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Plots the recorded step."""
        pipeline = _pipeline(trainer)
        if not pipeline.record:
            return
        pipeline.record = False
        timeline = pipeline.timeline()  # A collective call of the pipeline's ranks.
        if trainer.is_global_zero:
            self._show(trainer, pipeline, timeline)

    def _show(self, trainer: Trainer, pipeline: Pipeline, timeline: Timeline) -> None:
        from dlo_plugins.pipeline.pipeline_schedules import make_schedule
        from dlo_plugins.pipeline.timeline_plot import draw_comparison, simulate_ideal

        parts = len({item.action.micro_batch for row in timeline.rows for item in row if item.action.micro_batch >= 0})
        schedule = make_schedule(pipeline.schedule, pipeline.placement.ranks, parts, pipeline.stages_per_rank)
        theory = simulate_ideal(timeline, schedule)
        scalars = {"pipeline/bubble": timeline.bubble, "pipeline/bubble_of_theory": theory.bubble}
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)
        figure = draw_figure("PipelineTimeline", lambda: draw_comparison(timeline, schedule))
        path = Path(trainer.default_root_dir) / "pipeline.png"
        if figure is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=120)
            log_figure(trainer, "pipeline/timeline", figure)
        plotted = f"; plotted in {path}" if figure is not None else ""
        rank_zero_info(
            f"pipeline: {schedule.name}, {parts} micro-batches: ranks waited {timeline.bubble:.1%} of step {self.step},"
            f" by theory {theory.bubble:.1%}{plotted}"
        )


def _pipeline(trainer: Trainer) -> Pipeline:
    pipelined = contract_of(trainer.strategy).pipelined
    if pipelined is None:
        raise DloError(
            "PipelineTimeline: strategy must be MeshStrategy with pp of 2 or more, got one without a pipeline; set"
            " pp=2, or leave the callback out"
        )
    found: Pipeline = pipelined.pipeline
    return found
