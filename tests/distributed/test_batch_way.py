"""The way of a batch under pp, traced on two ranks, is that of the page on the architecture."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "concepts" / "architecture.md"
#: The first step also checks skip connections and sends layouts.
TRACED_STEP, MOST_FILES = 3, 11


def data_in(value: Any) -> bool:
    """Whether a value is, or holds, a tensor that is no parameter: a batch, a hidden state, a gradient."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(data_in(item) for item in value)
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


class Traced(MeshStrategy):
    """Notes the files of dlo whose functions get data in a training step, without those of the task.

    Parameters whose names begin with an underscore are not used: hooks of modules get the arguments of each call.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.step, self.files = 0, dict[str, None]()

    def training_step(self, batch: Any, *args: Any) -> Any:
        self.step += 1
        if self.step < TRACED_STEP:
            return super().training_step(batch, *args)
        sys.setprofile(self._note)
        try:
            return super().training_step(batch, *args)
        finally:
            sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or isinstance(frame.f_locals.get("self"), LightningModule):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)]
        used = [frame.f_locals[name] for name in names if not name.startswith("_")]
        file = Path(code.co_filename)
        ours = file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in ("dlo_framework", "plugins")
        if ours and any(map(data_in, used)):
            self.files[file.relative_to(ROOT).as_posix()] = None


def _trace(rank: int, world_size: int) -> list[str]:
    silence_lightning()
    seed_everything(7, workers=True, verbose=False)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}
    strategy = Traced(pp=2, dp_shard=1, micro_batches=4)
    run = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_steps=TRACED_STEP,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    task = ImageClassifier("vit_tiny_patch16_224", model_args=sizes, num_classes=10, lr=1e-3)
    run.fit(task, datamodule=DigitsData(image_size=16, batch_size=16))
    leave_group()
    return list(strategy.files)


def test_the_way_of_a_batch_is_that_of_the_page() -> None:
    first, last = run_distributed(_trace, 2, backend=None)
    section = PAGE.read_text().split("## The way of a batch under pp\n")[1].split("\n## ")[0]
    assert first == re.findall(r"^\d+\. `([^`]+)`", section, flags=re.MULTILINE)
    # Later stages check what they use of earlier ones.
    assert sorted([*first, "plugins/dlo_plugins/pipeline/skip_check.py"]) == sorted(last)
    assert len(first) <= MOST_FILES
