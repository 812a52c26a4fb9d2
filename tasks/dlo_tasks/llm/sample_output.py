"""Shows completed prompts in TensorBoard and on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from dlo_tasks.llm.generation import as_markdown


def log_samples(trainer: Trainer, prompts: Sequence[str], texts: Sequence[str]) -> None:
    """Writes prompts and their completions to TensorBoard, as text, at the run's step."""
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("samples", as_markdown(prompts, texts), trainer.global_step)


def print_samples(prompts: Sequence[str], texts: Sequence[str]) -> None:
    """Prints prompts, each with its completion."""
    print("\nsamples, each from its prompt on:")
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"--- {prompt!r}\n{prompt}{text}")
