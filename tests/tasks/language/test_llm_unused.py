"""Parameters that no text reaches: found before ranks start, with a fix that is true for the strategy."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from dlo_framework.distributed import gradient_check
from dlo_framework.distributed.gradient_check import find_unused, unused_message
from dlo_framework.distributed.strategy import DataParallelStrategy, register_data_parallel
from dlo_framework.errors import DloError
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.foreign_transformer import ForeignTask


def frozen(task: CausalLM) -> set[str]:
    task = task.on_meta()
    return {name for name, parameter in task.model.named_parameters() if not parameter.requires_grad}


def test_cross_attentions_of_bart_are_frozen() -> None:
    found = frozen(CausalLM(config=tiny("bart", dropout=False), freeze="auto"))
    assert found
    assert all(".encoder_attn" in name for name in found)
    assert "model.decoder.layers.0.encoder_attn.q_proj.weight" in found
    more = frozen(CausalLM(config=tiny("bart", dropout=False), freeze=["auto", "model.decoder.layers.0"]))
    assert {"model.decoder.layers.0.fc1.weight", "model.decoder.layers.1.encoder_attn.k_proj.bias"} <= more
    assert not frozen(CausalLM(config=tiny("llama", dropout=False), freeze="auto"))


def test_they_are_found_while_a_task_has_metrics() -> None:
    """A run makes metrics, whose states are no buffers, before it builds the model."""
    task = CausalLM(config=tiny("bart", dropout=False), freeze="auto")
    task.setup("fit")
    task.configure_model()
    assert not task.get_parameter("model.model.decoder.layers.0.encoder_attn.q_proj.weight").requires_grad


def test_the_error_offers_it() -> None:
    task = CausalLM(config=tiny("bart", dropout=False))
    assert "set --model.init_args.freeze auto, or set find_unused: true" in unused_message(["a"], module=task)
    told = CausalLM(config=tiny("bart", dropout=False), freeze="auto")
    assert "set requires_grad to False" in unused_message(["a"], module=told)
    assert "set requires_grad to False" in unused_message(["a"], module=nn.Linear(1, 1))


def test_a_step_that_needs_values_is_an_error() -> None:
    task = ForeignTask().on_meta()
    assert find_unused(task, task.example_batch(None)) == []
    task = Branching().on_meta()
    with pytest.raises(DloError, match=r"must be found by a step on fake tensors, got .*; name them instead"):
        find_unused(task, task.example_batch(None))


DDP = "use --trainer.strategy ddp_find_unused_parameters_true"
OPTION = "set find_unused: true in the strategy"
APPLIER = "set find_unused by the strategy's `appliers: [{class_path: FullyShard"


def check(strategy: Any, module: Any, *callbacks: Callback, devices: int = 2, trains: bool = True) -> None:
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False)
    trainer.strategy.check_model(module, None, trains=trains, callbacks=callbacks)


def bart(**options: Any) -> CausalLM:
    return CausalLM(config=tiny("bart", dropout=False), **options)


@pytest.mark.parametrize(
    ("strategy", "fix"),
    [
        (DataParallelStrategy, DDP),
        (lambda: ZeroStrategy(3), OPTION),
        (FSDPStrategy, OPTION),
        pytest.param(lambda: MeshStrategy(tp=2), APPLIER, marks=pytest.mark.slow),
    ],
)
def test_they_are_found_before_ranks_start(strategy: Any, fix: str) -> None:
    task = bart()
    with pytest.raises(DloError) as caught:
        check(strategy(), task)
    message = str(caught.value)
    assert "encoder_attn" in message
    assert f"set --model.init_args.freeze auto, or {fix}" in message
    assert not task.has_model  # It is built on the ranks.
    check(strategy(), bart(freeze="auto"))
    check(strategy(), task, trains=False)


class Freezing(Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.requires_grad_(False)


def test_it_is_allowed_where_the_strategy_looks_for_them() -> None:
    register_data_parallel()
    check(ZeroStrategy(2, find_unused=True), bart())
    check(FSDPStrategy(find_unused=True), bart())
    check("ddp_find_unused_parameters_true", bart())
    check(DataParallelStrategy(static_graph=True), bart())
    check(DataParallelStrategy(), bart(), devices=1)  # Without torch's wrapper such a run trains.
    check(DataParallelStrategy(), bart(), Freezing())


class Unused(ForeignTask):
    """Has a layer that no loss depends on."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.extra = torch.nn.Linear(2, 2)


class FreezesLate(Unused):
    def configure_optimizers(self) -> Any:
        self.model.extra.requires_grad_(False)
        return super().configure_optimizers()


class NeedsTrainer(Unused):
    def configure_optimizers(self) -> Any:
        raise RuntimeError("no trainer is attached")


class Branching(Unused):
    def loss(self, outputs: torch.Tensor, batch: object) -> torch.Tensor:
        return outputs[outputs > 0].sum()


class OwnStep(Unused):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


def test_a_task_of_a_user() -> None:
    with pytest.raises(DloError, match=r"got none for model\.extra\.bias and model\.extra\.weight|model\.extra"):
        check(ZeroStrategy(2), Unused())
    # The first step of the run checks these.
    for task in (FreezesLate, NeedsTrainer, Branching, OwnStep, ForeignTask):
        check(ZeroStrategy(2), task())


def test_ranks_that_have_started_check_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_check, "dist", SimpleNamespace(is_initialized=lambda: True))
    check(ZeroStrategy(2), bart())
