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
from torch import Tensor, nn

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.compression.gradient_compression import GradientCompression
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import WIDTH, Module, data, differ, found_by, mine, of, trainer


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

    def take_step(self, batch: Any, number: int, optimizers: Any, backward: Any) -> None:
        body, one, slow, probe = optimizers
        x, y = batch
        code = torch.tanh(self.body(x))
        body.zero_grad()
        one.zero_grad()
        if number % 2 == 0:
            slow.zero_grad()
        backward(nn.functional.cross_entropy(self.one(code), y), True)
        backward(self.slow(code).square().mean(), False)
        body.step()
        one.step()
        if number % 2 == 1:
            slow.step()
        backward(nn.functional.cross_entropy(self.probe(code.detach()), y), False)
        probe.step()
        probe.zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def backward(loss: Tensor, retain: bool) -> None:
            self.manual_backward(loss, retain_graph=retain)

        self.take_step(batch, batch_idx, self.optimizers(), backward)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.body(batch[0])

    def alone(self) -> dict[str, Tensor]:
        optimizers = self.configure_optimizers()
        for number, batch in enumerate(data()):
            if number == 2:
                self.zero_grad()
            self.take_step(batch, number, optimizers, lambda loss, retain: loss.backward(retain_graph=retain))
        return self.state_dict()


class WholeTensors(TwoTasks):
    """Likewise, with optimizers that need whole tensors."""

    whole = True


class Toggled(TwoTasks):
    """One optimizer's parameters alone are set to train for a second backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.one(self.body(batch[0])).square().mean())
        self.toggle_optimizer(self.optimizers()[3])
        self.manual_backward(self.probe(batch[0]).square().mean())


class Adversaries(LightningModule):
    """A generator and a discriminator that is toggled, as in Lightning's example of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator, self.critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            made = self.generator(torch.ones_like(batch[0]))
            loss = -self.critic(made) if number == 0 else self.critic(made.detach()) - self.critic(batch[0])
            optimizer.zero_grad()
            self.manual_backward(loss.mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def a_gan_trains_under_ddp_with_a_warning(rank: int, world: int, folder: Path) -> None:
    alone = Adversaries()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Adversaries()
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        run = trainer(world, DataParallelStrategy())
        run.fit(module, mine(rank, world))
    trained = {name: p for name, p in module.named_parameters() if name.endswith("weight")}  # A bias cancels out.
    assert all(differ({name: p}, {name: before[name]}) > 1e-3 for name, p in trained.items())
    generator, critic = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (alone.generator, alone.critic))
    for x, _ in data():
        for number, optimizer in enumerate((generator, critic)):
            made = alone.generator(torch.ones_like(x))
            loss = -alone.critic(made) if number == 0 else alone.critic(made.detach()) - alone.critic(x)
            alone.zero_grad()
            loss.mean().backward()
            optimizer.step()
    assert differ(dict(module.named_parameters()), dict(alone.named_parameters())) < 1e-6
    assert rank or any("Adversaries optimizes by hand" in str(one.message) for one in caught)


def each_optimizer_steps_what_was_gathered_for_it(rank: int, world: int, folder: Path) -> None:
    for kind in (TwoTasks, WholeTensors):
        expected = kind().alone()
        for name, strategy in STRATEGIES.items():
            # A validation after each second step: Lightning calls the module's own zero_grad before it.
            run, module = trainer(world, strategy(), limit_val_batches=1, val_check_interval=2), kind()
            run.fit(module, mine(rank, world), mine(rank, world))
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
    a_gan_trains_under_ddp_with_a_warning,
)


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by(CHECKS, rank, world, folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("changed"), timeout=290)


@pytest.mark.parametrize("check", CHECKS)
def test_it_holds_on_two_ranks(ranks: list[dict[str, Any]], check: Any) -> None:
    of(ranks, check.__name__)
