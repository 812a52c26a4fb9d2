"""Parameters that a callback unfreezes or writes, and optimizers stepped by hand: as in one process, or refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from timm.optim import Lamb
from torch import nn

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.compression.gradient_compression import GradientCompression
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import WIDTH, Module, differ, mine, trainer


class Unfreeze(Callback):
    """Freezes the stem, and unfreezes it before the third step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.net.stem.requires_grad_(False)  # type: ignore[union-attr]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            pl_module.net.stem.requires_grad_(True)  # type: ignore[union-attr]


class Finetuning(BaseFinetuning):
    """The same by Lightning's callback, in the second epoch."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.net.stem)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.stem, optimizer)


class Later(Module):
    """Adds nothing frozen to the optimizer, as Lightning's callback asks for."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.rate)


class All(Module):
    """Has one optimizer of all parameters, frozen ones too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.rate)


RUNS: dict[str, Any] = {"a callback": (All, Unfreeze), "Lightning's": (Later, Finetuning)}
TRAINS: dict[str, Any] = {
    "a callback": (DataParallelStrategy, FSDPStrategy),
    "Lightning's": (DataParallelStrategy,),
}
REFUSES = (lambda: ZeroStrategy(3), lambda: DeepSpeedBridge(stage=1))


def _weights(run: Trainer, module: LightningModule) -> dict[str, Any]:
    """Returns the weights: under ddp each rank's own, else the gathered ones on the first rank."""
    return module.state_dict() if isinstance(run.strategy, DataParallelStrategy) else gather_full_weights(run)


def what_is_unfrozen_trains_as_in_one_process_or_is_refused(rank: int, world: int, folder: Path) -> None:
    for name, (kind, callback) in RUNS.items():
        alone = kind()
        trainer(1, "auto", max_epochs=2, callbacks=[callback()]).fit(alone, mine(0, 1))
        expected = {key: value.clone() for key, value in alone.state_dict().items()}
        for strategy in TRAINS[name]:
            run, module = trainer(world, strategy(), max_epochs=2, callbacks=[callback()]), kind()
            run.fit(module, mine(rank, world))
            weights = _weights(run, module) or expected
            assert max(float((weights[key] - expected[key]).abs().max()) for key in expected) < 1e-5, name
    thawed = "net.stem.bias.*net.stem.weight"
    later = "which shards them first, got Finetuning of Lightning, which looks"
    both = "where a communication hook compresses gradients, got net.stem.weight, net.stem.bias"
    compressed = [Unfreeze(), GradientCompression("fp16")]
    for strategy, kind, callbacks, message in (
        *((strategy, All, [Unfreeze()], thawed) for strategy in REFUSES),
        (DataParallelStrategy, All, compressed, both),
        (lambda: ZeroStrategy(1), Later, [Finetuning()], f"under ZeroStrategy, {later}"),
        (FSDPStrategy, Later, [Finetuning()], f"under FSDPStrategy, {later}"),
    ):
        with pytest.raises(DloError, match=message):
            trainer(world, strategy(), max_epochs=2, callbacks=callbacks).fit(kind(), mine(rank, world))


class Clip(Callback):
    """Bounds the weights after each step, as Wasserstein GANs' critics do; in place, or by assignment."""

    def __init__(self, assigns: bool = False) -> None:
        self.assigns = assigns

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for parameter in pl_module.parameters():
            if self.assigns:
                parameter.data = parameter.data.clamp(-0.05, 0.05)
            else:
                parameter.clamp_(-0.05, 0.05)


def _prune(module: Any, resets: bool = False) -> ModelPruning:
    return ModelPruning(
        "l1_unstructured",
        [(module.net.head, "weight")],
        amount=0.3,
        make_pruning_permanent=False,
        use_lottery_ticket_hypothesis=resets,
    )


WRITERS: dict[str, Any] = {"clip": lambda module: Clip(), "assign": lambda module: Clip(assigns=True), "prune": _prune}
WRITES: dict[str, Any] = {
    "clip": (lambda: ZeroStrategy(2), FSDPStrategy, lambda: MeshStrategy(dp_replicate=2)),
    "assign": (lambda: ZeroStrategy(3),),
    "prune": (DataParallelStrategy, lambda: ZeroStrategy(1)),
}


def what_a_callback_writes_is_as_in_one_process_or_is_refused(rank: int, world: int, folder: Path) -> None:
    for name, callback in WRITERS.items():
        alone = All()
        trainer(1, "auto", max_epochs=2, callbacks=[callback(alone)]).fit(alone, mine(0, 1))
        expected = {key: value.clone() for key, value in alone.state_dict().items()}
        for strategy in WRITES[name]:
            module = All()
            run = trainer(world, strategy(), max_epochs=2, callbacks=[callback(module)])
            run.fit(module, mine(rank, world))
            weights = _weights(run, module) or expected
            assert max(float((weights[key] - expected[key]).abs().max()) for key in expected) < 1e-5, name
    pruned = "must not be pruned between steps, got ModelPruning; use"
    assigned = "must be written in place between steps, got net."
    for strategy, callback, message in (
        (lambda: ZeroStrategy(3), _prune, pruned),
        (FSDPStrategy, _prune, pruned),
        (lambda: ZeroStrategy(2), lambda module: Clip(assigns=True), assigned),
        (lambda: ZeroStrategy(1), lambda module: _prune(module, resets=True), assigned),
    ):
        module = All()
        with pytest.raises(DloError, match=message):
            trainer(world, strategy(), max_epochs=2, callbacks=[callback(module)]).fit(module, mine(rank, world))


class ScalesGradients(Callback):
    """Halves the parameters' gradients from the third step on."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for parameter in pl_module.parameters() if trainer.global_step > 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class AddsGroup(Callback):
    """Gives the optimizer a parameter for a second time."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.optimizers[0].add_param_group({"params": [next(pl_module.parameters())]})


HALF = {"precision": "bf16-mixed"}
GRADIENTS, GROUP = "must be read and changed through the optimizer", "from add_param_group"
#: Strategies, callbacks, options of the trainer, and the error.
LOST: list[tuple[Any, Any, dict[str, Any], str]] = [
    (lambda: ZeroStrategy(1), ScalesGradients, {}, GRADIENTS),
    (lambda: DeepSpeedBridge(stage=3), ScalesGradients, {}, GRADIENTS),
    (lambda: ZeroStrategy(2), AddsGroup, {}, GROUP),
    (lambda: DeepSpeedBridge(stage=2), AddsGroup, {}, GROUP),
    (lambda: ZeroStrategy(3, param_dtype="bfloat16"), Clip, HALF, "must be gathered in torch.float32"),
    (lambda: DeepSpeedBridge(stage=1), Clip, HALF, "must be written by its optimizer alone"),
]


def what_would_be_lost_is_refused(rank: int, world: int, folder: Path) -> None:
    for strategy, callback, options, message in LOST:
        with pytest.raises(DloError, match=message):
            trainer(world, strategy(), callbacks=[callback()], **options).fit(Module(), mine(rank, world))


# several optimizers stepped by hand, and never toggled: each one's gradients are its own, under every strategy


STRATEGIES = {
    "zero2": lambda: ZeroStrategy(2),
    "zero3": lambda: ZeroStrategy(3),
    "fsdp": FSDPStrategy,
    "ddp": DataParallelStrategy,
}


#: A validation after each second step: Lightning calls the module's own zero_grad before it.
EVALUATED = {"limit_val_batches": 1, "val_check_interval": 2}


class TwoTasks(LightningModule):
    """A body with two heads, and a probe of what the body has learned: four optimizers, three losses.

    The body's gradient is the sum of two backward passes, the probe's comes from a third, and the slow head gathers
    for two steps what the others use at once.
    """

    whole = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.one, self.slow, self.probe = (nn.Linear(WIDTH, WIDTH + more) for more in (0, 1, 2, 3))
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        kind: Any = (lambda p: Lamb(p, lr=0.05)) if self.whole else (lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-5))
        return [
            kind(self.body.parameters()),
            torch.optim.SGD(self.one.parameters(), lr=0.1, momentum=0.5),
            kind(self.slow.parameters()),
            torch.optim.SGD(self.probe.parameters(), lr=0.1),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (body, one, slow, probe), (x, y) = self.optimizers(), batch
        code = torch.tanh(self.body(x))
        body.zero_grad()
        one.zero_grad()
        if batch_idx % 2 == 0:
            slow.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.one(code), y), retain_graph=True)
        self.manual_backward(self.slow(code).square().mean())
        body.step()
        one.step()
        if batch_idx % 2 == 1:
            slow.step()
        self.manual_backward(nn.functional.cross_entropy(self.probe(code.detach()), y))
        probe.step()
        probe.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.body(batch[0])


class WholeTensors(TwoTasks):
    """Likewise, with optimizers that need whole tensors."""

    whole = True


class Toggled(TwoTasks):
    """One optimizer's parameters alone are set to train for a second backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.one(self.body(batch[0])).square().mean())
        self.toggle_optimizer(self.optimizers()[3])
        self.manual_backward(self.probe(batch[0]).square().mean())


def each_optimizer_steps_what_was_gathered_for_it(rank: int, world: int, folder: Path) -> None:
    for kind in (TwoTasks, WholeTensors):
        alone = kind()
        trainer(1, "auto", **EVALUATED).fit(alone, mine(0, 1), mine(0, 1))
        expected = {key: value.clone() for key, value in alone.state_dict().items()}
        for name, strategy in STRATEGIES.items():
            run, module = trainer(world, strategy(), **EVALUATED), kind()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run.fit(module, mine(rank, world), mine(rank, world))
            told = any(f"{kind.__name__} optimizes by hand" in str(one.message) for one in caught)
            assert rank or told == (name == "ddp"), (kind, name)
            weights = gather_full_weights(run)
            assert rank or differ(weights, expected) < 1e-6, (kind, name)


def plain_data_parallelism_names_parameters_without_a_gradient(rank: int, world: int, folder: Path) -> None:
    """It wants all gradients in each backward where it is told not to look for them."""
    for kind in (TwoTasks, Toggled):
        with pytest.raises(DloError) as error:
            trainer(world, DataParallelStrategy(find_unused_parameters=False)).fit(kind(), mine(rank, world))
        assert "got none for slow.weight, slow.bias, probe.weight, probe.bias" in str(error.value)
        assert "ddp_find_unused_parameters_true" in str(error.value)


CHECKS = (
    what_a_callback_writes_is_as_in_one_process_or_is_refused,
    what_is_unfrozen_trains_as_in_one_process_or_is_refused,
    what_would_be_lost_is_refused,
    each_optimizer_steps_what_was_gathered_for_it,
    plain_data_parallelism_names_parameters_without_a_gradient,
)


@pytest.mark.parametrize("check", CHECKS)
def test_it_holds_on_two_ranks(check: Any, tmp_path: Path) -> None:
    run_distributed(check, 2, tmp_path, timeout=290)
