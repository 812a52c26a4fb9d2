"""Tests of WeightNormLogger."""

from typing import Any

import pytest
import torch
from dlo_example_pack.weight_norm import WeightNormLogger, weight_norms
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from torch import nn

from dlo_framework import DloError


class Memory(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = "memory"
    version = "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, {key: value for key, value in metrics.items() if key.startswith("weight_norm")}))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


def test_norms_by_part_and_in_total() -> None:
    model = nn.ModuleDict({"stem": nn.Linear(1, 2), "head": nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))})
    for parameter in model.parameters():
        nn.init.constant_(parameter, 2.0)
    model["stem"].bias.requires_grad_(False)
    norms = weight_norms(model, depth=1)
    assert list(norms) == ["stem", "head", "total"]
    assert norms["stem"] ** 2 == pytest.approx(2 * 4)  # Its bias is frozen.
    assert norms["head"] ** 2 == pytest.approx(5 * 4)
    assert norms["total"] ** 2 == pytest.approx(7 * 4)
    assert list(weight_norms(model, depth=2)) == ["stem", "head.0", "head.1", "total"]
    assert list(weight_norms(model, depth=0)) == ["total"]


def test_a_module_without_weights_has_norm_zero() -> None:
    assert weight_norms(nn.ReLU(), depth=2)["total"] == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_logs_once_at_each_due_step(accumulate: int) -> None:
    memory = Memory()
    model = BoringModel()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=5,
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
        logger=memory,
        callbacks=[WeightNormLogger(every_n_steps=2)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    rows = [(step, row) for step, row in memory.rows if row]
    assert [step for step, _ in rows] == [2, 4]
    assert list(rows[0][1]) == ["weight_norm/layer", "weight_norm/total"]
    assert rows[0][1]["weight_norm/total"] == pytest.approx(rows[0][1]["weight_norm/layer"])


@pytest.mark.parametrize(("arguments", "message"), [({"every_n_steps": 0}, "got 0"), ({"depth": -1}, "got -1")])
def test_bad_values_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(DloError, match=message):
        WeightNormLogger(**arguments)


def test_half_precision_weights_do_not_overflow() -> None:
    layer = nn.Linear(1000, 1000, bias=False).half()
    nn.init.constant_(layer.weight, 100.0)
    assert torch.isfinite(weight_norms(layer, depth=0)["total"])
