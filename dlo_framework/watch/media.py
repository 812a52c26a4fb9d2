"""Numbers, images and texts for the loggers of a run.

Lightning has no common method for images and texts. TensorBoard's writer has its own, and so have the experiments of
``MLFlowLogger`` and ``CometLogger``; ``WandbLogger`` has ``log_image`` and ``log_text``, which a logger of your own may
define too. ``CSVLogger`` gets files in its folder: ``media/<tag>/<step>.png`` and ``.md``. For any other logger a
message says once that it gets none.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from dlo_framework.atomic_file import open_atomic, write_atomic
from dlo_framework.watch.monitor import is_tensorboard

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def is_logged(trainer: Trainer, step: int) -> bool:
    """Returns whether a step is one of those, every ``trainer.log_every_n_steps``, whose numbers are logged."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and step % every == 0


def log_scalars(trainer: Trainer, scalars: Mapping[str, float], step: int | None = None) -> None:
    """Logs numbers to all loggers.

    Args:
        trainer: Trainer of the run.
        scalars: Numbers by name.
        step: Number of the optimizer step; None for the run's.
    """
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=trainer.global_step if step is None else step)


def log_image(trainer: Trainer, tag: str, make: Callable[[], Tensor]) -> None:
    """Logs an image at the run's step; only on rank 0, so that all ranks may call it.

    Args:
        trainer: Trainer of the run.
        tag: Name of the image.
        make: Function that returns the image, ``[3, H, W]`` of uint8; called only if a logger takes images.
    """
    loggers = _taking(trainer, "log_image", tag)
    image = make() if loggers else None
    for logger in loggers:
        assert image is not None
        pixels, step = image.permute(1, 2, 0).cpu().numpy(), trainer.global_step  # [H, W, RGB]
        if is_tensorboard(logger):
            logger.experiment.add_image(tag, image, step)
        elif callable(getattr(logger, "log_image", None)):
            logger.log_image(key=tag, images=[pixels], step=step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_image(logger.run_id, pixels, key=tag, step=step, synchronous=True)
        elif isinstance(logger, CometLogger):
            logger.experiment.log_image(pixels, name=tag, step=step)
        else:
            from PIL import Image

            with open_atomic(_file(logger, tag, step, "png")) as path:
                Image.fromarray(pixels).save(path, format="png")


def draw_figure(owner: str, draw: Callable[[], Figure | None]) -> Figure | None:
    """Returns the figure that a function draws; None where matplotlib is not installed, which a message says once.

    Args:
        owner: Name of the callback or command, for the message.
        draw: Function that imports matplotlib and returns the figure.
    """
    if importlib.util.find_spec("matplotlib") is None:
        _name_missing_matplotlib(owner)
        return None
    return draw()


def save_figure(trainer: Trainer, owner: str, tag: str, path: Path, draw: Callable[[], Figure]) -> Path | None:
    """Draws a figure on rank 0, saves it as a PNG, and logs it as an image.

    Args:
        trainer: Trainer of the run.
        owner: Name of the callback, for the message where matplotlib is not installed.
        tag: Name of the image.
        path: File; its folder is made.
        draw: Function that imports matplotlib and returns the figure.

    Returns:
        The path; None on other ranks, and without matplotlib.
    """
    figure = draw_figure(owner, draw) if trainer.is_global_zero else None
    if figure is None:
        return None
    with open_atomic(path) as file:
        figure.savefig(file, dpi=120, format="png")
    log_figure(trainer, tag, figure)
    return path


def log_figure(trainer: Trainer, tag: str, figure: Figure) -> None:
    """Logs a figure of matplotlib as an image, whatever backend the program's others use; see :func:`log_image`."""

    def make() -> Tensor:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return torch.from_numpy(np.array(canvas.buffer_rgba())).permute(2, 0, 1)[:3]  # [H, W, RGBA] -> [RGB, H, W]

    log_image(trainer, tag, make)


def log_text(trainer: Trainer, tag: str, make: Callable[[], str]) -> None:
    """Logs a text in Markdown at the run's step; only on rank 0, so that all ranks may call it.

    Args:
        trainer: Trainer of the run.
        tag: Name of the text.
        make: Function that returns the text; called only if a logger takes texts.
    """
    for logger in _taking(trainer, "log_text", tag):
        text, step = make(), trainer.global_step
        if is_tensorboard(logger):
            logger.experiment.add_text(tag, text, step)
        elif callable(getattr(logger, "log_text", None)):
            logger.log_text(key=tag, columns=["text"], data=[[text]], step=step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(logger.run_id, text, f"texts/{tag}/{step}.md")
        elif isinstance(logger, CometLogger):
            logger.experiment.log_text(text, step=step, metadata={"tag": tag})
        else:
            write_atomic(_file(logger, tag, step, "md"), text)


def _taking(trainer: Trainer, method: str, tag: str) -> list[Any]:
    """Returns the loggers that take images or texts, by the name of their method; none on ranks other than 0."""
    loggers: list[Any] = list(trainer.loggers) if trainer.is_global_zero else []
    taking = [
        logger
        for logger in loggers
        if is_tensorboard(logger)
        or callable(getattr(logger, method, None))
        or isinstance(logger, CSVLogger | MLFlowLogger | CometLogger)
    ]
    names = ", ".join(type(logger).__name__ for logger in taking)
    for logger in loggers:
        if logger not in taking:
            _name_missing(type(logger).__name__, method, tag, names)
    return taking


def _file(logger: Any, tag: str, step: int, ending: str) -> Path:
    """Returns the file of an image or a text; a tag may have slashes, which make folders."""
    path = Path(logger.log_dir, "media", *tag.split("/"), f"{step}.{ending}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def _name_missing_matplotlib(owner: str) -> None:
    rank_zero_warn(f"{owner} draws no figure: matplotlib is not installed; pip install 'dlo_framework[plots]'")


@functools.cache
def _name_missing(logger: str, method: str, tag: str, others: str) -> None:
    kind = method.removeprefix("log_")
    advice = f"add a TensorBoardLogger beside it, or define {method}(key, ...) as in WandbLogger in your own logger"
    rank_zero_info(
        f"{logger} takes no {kind}s, so {tag} is not logged there; {f'it is logged to {others}' if others else advice}"
    )
