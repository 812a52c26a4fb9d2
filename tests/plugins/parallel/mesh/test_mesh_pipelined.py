"""What the ranks of a pipeline tell each other of a batch, and what they wait for."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache

from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_plugins.parallel.mesh import pipelined_task
from dlo_plugins.parallel.mesh.pipelined_task import PipelinedTask, concat_batches


class Placed:
    """Something that can be moved, as a tensor of an accelerator's; a CPU has no second device for tensors."""

    def __init__(self, device: str) -> None:
        self.device = device

    def to(self, device: Any, **_: Any) -> Placed:
        return Placed(str(device))


class Told(Task):
    """Gives back the model's outputs."""

    def configure_model(self) -> None: ...

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return torch.zeros(())


def pipelined(is_last: bool, device: str, outputs: Any = None) -> PipelinedTask:
    placement = SimpleNamespace(ranks=2, stages=2, rank_of=lambda stage: stage)
    found: Any = SimpleNamespace(placement=placement, is_last=is_last, device=torch.device(device), group=None)
    found.without_other_stages = nullcontext
    found.evaluate = lambda parts, forward, stream: [outputs] if is_last else None
    return PipelinedTask(Told(), found, micro_batches=2)


def test_outputs_are_told_from_the_cpu_and_the_last_stage_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, **_: sent.extend(objects))
    outputs = {"logits": Placed("cuda:1"), "pair": (Placed("cuda:1"), Placed("cuda:1"))}
    found = pipelined(True, "cuda:1", outputs).predict((torch.zeros(1, 2),), 0)
    assert [item.device for item in (sent[0]["logits"], *sent[0]["pair"])] == ["cpu"] * 3
    assert [item.device for item in (found["logits"], *found["pair"])] == ["cuda:1"] * 3


def test_measures_reach_all_stages_in_single_precision_whatever_the_default_dtype(
    monkeypatch: pytest.MonkeyPatch, default_dtype: None
) -> None:
    told = ({"val_loss": 2.2987654}, {})
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, **_: objects.__setitem__(0, told))
    stage = pipelined(False, "cpu")
    logged: dict[str, Tensor] = {}
    monkeypatch.setattr(pipelined_task, "log_measures", lambda task, measures, batch: logged.update(measures))
    stage.evaluate((torch.zeros(1, 2),))
    assert logged["val_loss"].item() == pytest.approx(2.2987654, rel=1e-6)


def test_outputs_that_cannot_be_joined_are_named() -> None:
    parts = [
        {"all": [torch.ones(rows), None, "x", torch.tensor(0.07), torch.tensor(value), 2.0 * value, 3]}
        for rows, value in ((2, 1.0), (1, 4.0))
    ]
    rows, *plain = concat_batches(parts, [2 / 3, 1 / 3])["all"]
    assert rows.shape == (3,)
    # A learned temperature is that of one process, and a term of a loss its mean.
    assert plain == [None, "x", torch.tensor(0.07), torch.tensor(2.0), 4.0, 3]
    with pytest.raises(DloError, match=r"got different values of int; leave it out"):
        concat_batches([{"count": 2}, {"count": 3}], [0.5, 0.5])
    with pytest.raises(DloError, match=r"got a DynamicCache; leave it out .*use_cache=False"):
        concat_batches([{"past": DynamicCache()}, {"past": DynamicCache()}], [0.5, 0.5])
