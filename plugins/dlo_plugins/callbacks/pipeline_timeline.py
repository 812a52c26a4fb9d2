"""A picture of what each rank of a pipeline computed when: the schedule as it ran, beside what theory makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from dlo_framework.contract import contract_of
from dlo_framework.errors import DloError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dlo_plugins.pipeline.engine import Pipeline
    from dlo_plugins.pipeline.simulate import Timeline


class PipelineTimeline(Callback):
    """Draws one step of a pipeline as it was measured: who computed what when, and how long ranks waited.

    Above, the step as it ran; below, the same costs in a world where nothing but the schedule makes a rank wait. The
    picture goes to TensorBoard (`pipeline/timeline`) and, as `pipeline.png`, to the run's folder; the share of time in
    which ranks waited, as `pipeline/bubble` and `pipeline/bubble_of_theory`, to the loggers.

    Args:
        step: the optimizer step that is measured, from 0; the first ones are slow, as memory is new to them.

    Raises:
        DloError: for a negative step, and without a pipeline (MeshStrategy with `pp` of 2 or more).
    """

    #: Why `dlo parity` trains without it: the one process of the comparison has no pipeline.
    left_out_of_parity = "it draws a run and changes nothing in it"

    def __init__(self, step: int = 5) -> None:
        if step < 0:
            raise DloError(f"step is the number of an optimizer step, from 0, but was {step}")
        self.step = step
        self._recording = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks for the pipeline."""
        _pipeline(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Has the step's first batch recorded."""
        if trainer.global_step == self.step and not self._recording:
            self._recording = _pipeline(trainer).record = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draws what was recorded."""
        pipeline = _pipeline(trainer)
        if not pipeline.record:
            return
        pipeline.record = False
        timeline = pipeline.timeline()  # All ranks of the pipeline have to ask.
        if trainer.is_global_zero:
            self._show(trainer, pipeline, timeline)

    def _show(self, trainer: Trainer, pipeline: Pipeline, timeline: Timeline) -> None:
        from dlo_plugins.pipeline.picture import as_run, ideal
        from dlo_plugins.pipeline.schedules import make_schedule

        parts = len({item.action.micro_batch for row in timeline.rows for item in row})
        schedule = make_schedule(pipeline.schedule, pipeline.placement.ranks, parts, pipeline.stages_per_rank)
        theory = ideal(timeline, schedule)
        scalars = {"pipeline/bubble": timeline.bubble, "pipeline/bubble_of_theory": theory.bubble}
        figure = as_run(timeline, schedule)
        path = Path(trainer.default_root_dir) / "pipeline.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)
            if isinstance(logger, TensorBoardLogger):
                _add_figure(logger, figure, trainer.global_step)
        rank_zero_info(
            f"pipeline: {schedule.name}, {parts} micro-batches: ranks waited {timeline.bubble:.1%} of step {self.step},"
            f" by theory {theory.bubble:.1%}; drawn in {path}"
        )


def _add_figure(logger: TensorBoardLogger, figure: Figure, step: int) -> None:
    from dlo_plugins.callbacks.lr_finder import pixels

    logger.experiment.add_image("pipeline/timeline", pixels(figure), step, dataformats="HWC")


def _pipeline(trainer: Trainer) -> Pipeline:
    pipelined = contract_of(trainer.strategy).pipelined
    if pipelined is None:
        raise DloError(
            "PipelineTimeline draws the steps of a pipeline, and this run has none; set MeshStrategy with pp of"
            " 2 or more, or leave the callback out"
        )
    found: Pipeline = pipelined.pipeline
    return found
