"""Logger for Trackio, a dashboard that keeps its data in a local database: ``trackio show`` opens it."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from dlo_framework.errors import DloError


class TrackioLogger(Logger):
    """Logger for Trackio (0.43), with images and texts.

    Args:
        project: Name of the project, which the dashboard shows together.
        run: Name of the run; None lets Trackio choose one. A resumed run continues a run of the same name.
        group: Group of the run in the dashboard.
        space_id: Hugging Face Space to send the values to, such as `me/curves`; None keeps them on this machine.

    Raises:
        DloError: If Trackio is not installed.
    """

    def __init__(
        self, project: str = "dlo", run: str | None = None, group: str | None = None, space_id: str | None = None
    ) -> None:
        super().__init__()
        if importlib.util.find_spec("trackio") is None:
            raise DloError(
                "TrackioLogger needs the package trackio, which is not installed; pip install 'dlo_framework[loggers]'"
            )
        self.project, self.run, self.group, self.space_id = project, run, group, space_id
        self._experiment: Any = None

    @property
    def name(self) -> str:
        """Name of the project."""
        return self.project

    @property
    def version(self) -> str | None:
        """Name of the run."""
        return self.run if self._experiment is None else str(self._experiment.name)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Trackio's run, which is started when it is first used."""
        if self._experiment is None:
            import trackio

            self._experiment = trackio.init(
                project=self.project,
                name=self.run,
                group=self.group,
                space_id=self.space_id,
                resume="allow",
                embed=False,
                auto_log_gpu=False,  # RunMonitor logs the device's memory.
                auto_log_cpu=False,
            )
        return self._experiment

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Adds hyperparameters to the run's config, which Trackio stores with the first values."""
        flat = {key: _plain(value) for key, value in _flatten_dict(_convert_params(params)).items()}
        self.experiment.config.update(flat)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs numbers."""
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        """Logs images, ``[H, W, 3]`` of uint8 each; several get a number after their name."""
        import trackio

        names = [key] if len(images) == 1 else [f"{key}/{number}" for number in range(len(images))]
        by_name = {name: trackio.Image(image) for name, image in zip(names, images, strict=True)}
        self.experiment.log(by_name, step=step)

    @rank_zero_only
    def log_text(
        self, key: str, columns: list[str] | None = None, data: list[list[str]] | None = None, step: int | None = None
    ) -> None:
        """Logs texts in Markdown, one a row of ``data``."""
        import trackio

        text = "\n\n".join(" ".join(row) for row in data or ())
        self.experiment.log({key: trackio.Markdown(text)}, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes what is left and ends the run."""
        if self._experiment is None:
            return
        from trackio.context_vars import current_run

        self._experiment.finish()
        if current_run.get() is self._experiment:
            current_run.set(None)  # Trackio would finish it once more when the process ends, and say so twice.
        self._experiment = None


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
