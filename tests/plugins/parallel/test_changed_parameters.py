"""Parameters that a callback unfreezes or writes, and optimizers stepped by hand: as in one process, or refused."""

from __future__ import annotations

import warnings
from functools import partial
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
from support.fsdp_nets import WIDTH, Module, differ, fit, mine, trainer
from support.on_ranks import on_ranks


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


#: Modules, callbacks by module, and strategies under which they train as in one process.
ALIKE: list[tuple[type[Module], Any, tuple[Any, ...]]] = [
    (All, lambda _: Unfreeze(), (DataParallelStrategy, FSDPStrategy)),
    (Later, lambda _: Finetuning(), (DataParallelStrategy,)),
    (All, lambda _: Clip(), (partial(ZeroStrategy, 2), FSDPStrategy, partial(MeshStrategy, dp_replicate=2))),
    (All, lambda _: Clip(assigns=True), (partial(ZeroStrategy, 3),)),
    (All, _prune, (DataParallelStrategy, partial(ZeroStrategy, 1))),
]


@on_ranks(2)
def test_what_callbacks_unfreeze_or_write_trains_as_in_one_process(rank: int, world: int) -> None:
    for kind, callback, strategies in ALIKE:
        alone = kind()
        fit(0, 1, alone, "auto", max_epochs=2, callbacks=[callback(alone)])
        expected = {key: value.clone() for key, value in alone.state_dict().items()}
        for strategy in strategies:
            module = kind()
            run = fit(rank, world, module, strategy(), max_epochs=2, callbacks=[callback(module)])
            # Under ddp each rank's own weights, else the gathered ones on the first rank.
            weights = module.state_dict() if strategy is DataParallelStrategy else gather_full_weights(run) or expected
            assert max(float((weights[key] - expected[key]).abs().max()) for key in expected) < 1e-5, strategy


HALF = {"precision": "bf16-mixed"}
THAWED, LATER = "net.stem.bias.*net.stem.weight", "which shards them first, got Finetuning of Lightning, which looks"
BOTH = "where a communication hook compresses gradients, got net.stem.weight, net.stem.bias"
PRUNED, ASSIGNED = "must not be pruned between steps, got ModelPruning; use", "in place between steps, got net."
GRADIENTS, GROUP = "must be read and changed through the optimizer", "from add_param_group"
#: Strategies, modules, callbacks by module, options of the trainer, and the error.
REFUSED: list[tuple[Any, type[Module], Any, dict[str, Any], str]] = [
    (partial(ZeroStrategy, 3), All, lambda _: [Unfreeze()], {}, THAWED),
    (DataParallelStrategy, All, lambda _: [Unfreeze(), GradientCompression("fp16")], {}, BOTH),
    (partial(ZeroStrategy, 1), Later, lambda _: [Finetuning()], {}, f"under ZeroStrategy, {LATER}"),
    (FSDPStrategy, Later, lambda _: [Finetuning()], {}, f"under FSDPStrategy, {LATER}"),
    (partial(ZeroStrategy, 3), All, lambda module: [_prune(module)], {}, PRUNED),
    (FSDPStrategy, All, lambda module: [_prune(module)], {}, PRUNED),
    (partial(ZeroStrategy, 2), All, lambda _: [Clip(assigns=True)], {}, ASSIGNED),
    (partial(ZeroStrategy, 1), All, lambda module: [_prune(module, resets=True)], {}, ASSIGNED),
    (partial(ZeroStrategy, 1), Module, lambda _: [ScalesGradients()], {}, GRADIENTS),
    (partial(ZeroStrategy, 2), Module, lambda _: [AddsGroup()], {}, GROUP),
    (partial(ZeroStrategy, 3, param_dtype="bfloat16"), Module, lambda _: [Clip()], HALF, "gathered in torch.float32"),
    (partial(DeepSpeedBridge, stage=1), Module, lambda _: [Clip()], HALF, "must be written by its optimizer alone"),
]
#: By checks that ZeRO has too, but the first, which test_deepspeed_options has: in the slow test.
BY_DEEPSPEED: list[tuple[Any, type[Module], Any, dict[str, Any], str]] = [
    (partial(DeepSpeedBridge, stage=1), All, lambda _: [Unfreeze()], {}, THAWED),
    (partial(DeepSpeedBridge, stage=3), Module, lambda _: [ScalesGradients()], {}, GRADIENTS),
    (partial(DeepSpeedBridge, stage=2), Module, lambda _: [AddsGroup()], {}, GROUP),
]


def _refused(rank: int, world: int, by_deepspeed: bool) -> None:
    for strategy, kind, callbacks, options, message in BY_DEEPSPEED if by_deepspeed else REFUSED:
        module = kind()
        with pytest.raises(DloError, match=message):
            fit(rank, world, module, strategy(), max_epochs=2, callbacks=callbacks(module), **options)


@pytest.mark.parametrize("by_deepspeed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_would_be_lost_is_refused(by_deepspeed: bool) -> None:
    run_distributed(_refused, 2, by_deepspeed)


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


@on_ranks(2)
def test_each_optimizer_steps_what_was_gathered_for_it(rank: int, world: int) -> None:
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


@on_ranks(2)
def test_plain_data_parallelism_names_parameters_without_a_gradient(rank: int, world: int) -> None:
    """It wants all gradients in each backward where it is told not to look for them."""
    for kind in (TwoTasks, Toggled):
        with pytest.raises(DloError) as error:
            fit(rank, world, kind(), DataParallelStrategy(find_unused_parameters=False))
        assert "got none for slow.weight, slow.bias, probe.weight, probe.bias" in str(error.value)
        assert "ddp_find_unused_parameters_true" in str(error.value)
