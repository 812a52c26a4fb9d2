"""The files that a save and a load go through are those that the page on the architecture lists."""

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from dlo_framework.checkpoint import saving
from dlo_framework.checkpoint.tensor_file import dtype_of
from dlo_framework.distributed.strategy import use_canonical_checkpoints

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "architecture.md"
CORE = ROOT / "dlo_framework"


def files_of(work: Callable[[], object]) -> set[str]:
    """The files of checkpoint/, and the strategy's part of it, whose functions are called."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = [Path(name) for name in found if Path(name).is_relative_to(CORE)]
    return {
        path.relative_to(ROOT).as_posix()
        for path in inside
        if path.parent.name in ("checkpoint", "formats") or path == CORE / "distributed" / "checkpointing.py"
    }


class Adam(BoringModel):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trainer(steps: int) -> Trainer:
    made = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    use_canonical_checkpoints(made)
    return made


def listed(way: str) -> list[str]:
    section = PAGE.read_text().partition("## The way of a save, of a load")[2].partition("\n## ")[0]
    table = section.partition(f"file of a {way} |")[2].partition("\n\n")[0]
    return re.findall(r"^\| \d \| `([\w/.]+)`", table, re.MULTILINE)


def test_the_page_lists_the_files_of_a_save_and_of_a_load_in_at_most_seven_each(tmp_path: Path) -> None:
    run = trainer(2)
    run.fit(Adam())
    saving._cached_plans.clear()
    dtype_of.cache_clear()
    path = tmp_path / "last.ckpt"
    saved = files_of(lambda: run.save_checkpoint(path))
    dtype_of.cache_clear()
    loaded = files_of(lambda: trainer(4).fit(Adam(), ckpt_path=path))
    assert saved == set(listed("save"))
    assert loaded == set(listed("load"))
    assert len(listed("save")) == len(saved) <= 7
    assert len(listed("load")) == len(loaded) <= 7
