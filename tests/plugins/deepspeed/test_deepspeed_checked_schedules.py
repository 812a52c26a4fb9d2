"""A DeepSpeed JSON's scheduler beside a task's or a callback's own: found before ranks start, with the file's name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.schedules.lr_curves import OneCycle
from support.foreign_transformer import ForeignTask

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}


class Scheduled(ForeignTask):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class ByTrainer(ForeignTask):
    """Its schedule needs the run's length, as those of dlo's tasks do."""

    schedule = "cosine"

    def configure_optimizers(self) -> Any:
        return self.trainer.estimated_stepping_batches


def bridge(folder: Path, **sections: Any) -> DeepSpeedBridge:
    path = folder / "ours.json"
    path.write_text(json.dumps(sections))
    return DeepSpeedBridge(config=str(path))


def test_a_callback_that_sets_the_rate(tmp_path: Path) -> None:
    strategy = bridge(tmp_path, optimizer=ADAM, scheduler=WARMUP)
    with pytest.raises(DloError, match=r"ours.json: scheduler must be unset .* OneCycle .* got WarmupLR; remove"):
        strategy.check_model(ForeignTask(), callbacks=[OneCycle()])
    strategy.check_model(ForeignTask())
    strategy.check_model(ForeignTask(), trains=False, callbacks=[OneCycle()])
    bridge(tmp_path, optimizer=ADAM).check_model(ForeignTask(), callbacks=[OneCycle()])


@pytest.mark.parametrize("task", [Scheduled, ByTrainer])
def test_an_optimizer_alone_under_a_tasks_schedule(tmp_path: Path, task: Any) -> None:
    with pytest.raises(DloError, match=r"ours.json: optimizer and scheduler must be set together .* add a scheduler"):
        bridge(tmp_path, optimizer=ADAM).check_model(task())
    bridge(tmp_path, optimizer=ADAM, scheduler=WARMUP).check_model(task())
    bridge(tmp_path, scheduler=WARMUP).check_model(task())
