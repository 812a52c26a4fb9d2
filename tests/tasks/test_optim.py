import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from lightning.pytorch import Callback, LightningModule
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.errors import DloError
from dlo_framework.progress import AccumulationTail
from dlo_framework.run.resume import ExactResume
from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize
from dlo_plugins.schedules.lr_curves import OneCycle
from dlo_tasks import optim
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer

TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **TINY)


def run(epoch=0, ready=0, batches=10, max_epochs=4, max_steps=-1, step=0, accumulate=1):
    progress = SimpleNamespace(current=SimpleNamespace(ready=ready))
    return SimpleNamespace(
        max_epochs=max_epochs,
        max_steps=max_steps,
        current_epoch=epoch,
        global_step=step,
        num_training_batches=batches,
        accumulate_grad_batches=accumulate,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        train_dataloader=None,
    )


def test_the_schedules_at_known_fractions():
    found = [optim.lr_factor(f, warmup=0.1, start=0.1, end=0.2) for f in (0.0, 0.05, 0.1, 0.325, 0.55, 1.0, 2.0)]
    assert found == pytest.approx([0.1, 0.55, 1.0, 0.2 + 0.8 * 0.5 * (1 + 0.5**0.5), 0.6, 0.2, 0.2])
    found = [optim.lr_factor(f, 0.2, 0.0, 0.5, "linear") for f in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert found == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5])
    assert optim.lr_factor(0.5, 2.0, 0.0, 0.0) == 0.25  # training ends within the warm-up


def factor_at(trainer, epochs, steps, start=0.0, shape="linear"):
    """Returns the factor of a schedule that goes on from a checkpoint which has not kept where its warm-up ended."""
    return optim.WarmedUp(trainer, epochs, steps, start, 0.0, shape)(0)


def test_warm_up_in_epochs_and_in_steps():
    assert factor_at(run(ready=2), 0.5, None) == 0.4
    assert factor_at(run(ready=2, step=3), 0.5, 4) == 0.75
    assert factor_at(run(ready=5, step=1, accumulate=5), 0.5, None) == 1.0
    assert factor_at(run(ready=5, step=1, accumulate=5, max_steps=20), 1, None) == 0.5
    # What part of training the warm-up was: an eighth, and a tenth, and a half.
    assert factor_at(run(epoch=2, ready=2), 0.5, None) == pytest.approx((1 - 0.55) / (1 - 0.125))
    assert factor_at(run(epoch=2, ready=2, step=22), 0.5, 4) == pytest.approx((1 - 0.55) / (1 - 0.1))
    assert factor_at(run(epoch=3, ready=5, step=7, accumulate=5), 0.0, 4) == pytest.approx((1 - 0.875) / (1 - 0.5))
    assert factor_at(run(ready=3, batches=math.inf, max_epochs=None, max_steps=20, step=12), 0, 4) == 0.5
    with pytest.raises(DloError, match="set warmup_steps"):
        factor_at(run(ready=1, batches=math.inf, max_steps=20), 1, None)


class Climb(LightningModule):
    """Keeps the learning rate of each of its optimizer steps, under a schedule with a warm-up."""

    def __init__(self, **warmup) -> None:
        super().__init__()
        self.net, self.warmup = nn.Linear(3, 2), warmup
        self.rates: list[float] = []

    def training_step(self, batch, batch_idx):
        return self.net(batch[0].flatten(1)[:, :3]).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return optim.scheduled(optimizer, self._trainer, "cosine", **self.warmup)


class SaveAfter(Callback):
    def __init__(self, steps, path) -> None:
        self.steps, self.path = steps, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps and not self.path.exists():
            trainer.save_checkpoint(self.path)


def climb(data, *callbacks, ckpt_path=None, options, **warmup):
    module = Climb(**warmup)
    every = [ExactResume(), AccumulationTail(), *callbacks]
    quiet_trainer(limit_val_batches=0, callbacks=every, **options).fit(
        module, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None
    )
    return module.rates


def smooth(rates, top):
    """Whether they rise in equal steps to 1, and then fall throughout."""
    assert rates[: top + 1] == pytest.approx([step / top for step in range(top + 1)])
    assert all(0 <= later < sooner for sooner, later in itertools.pairwise(rates[top:]))


@pytest.mark.parametrize("resume", [4, 12, 15])
def test_the_warm_up_rises_evenly_where_epochs_end_amid_a_window(tmp_path, resume):
    data = DataLoader(TensorDataset(torch.ones(9, 3)), batch_size=1)
    options = {"max_epochs": 10, "accumulate_grad_batches": 8}  # steps of 8 batches and of 1
    save = SaveAfter(resume, tmp_path / "at.ckpt")
    rates = climb(data, save, options=options, warmup_steps=11)
    assert len(rates) == 20
    smooth(rates, 11)
    # The fall begins where the rise ended, 5 epochs and 8 of 9 batches into 10 epochs.
    begun, at = (5 + 8 / 9) / 10, 8 / 10
    assert rates[16] == pytest.approx(0.5 * (1 + math.cos(math.pi * (at - begun) / (1 - begun))))
    assert climb(data, ckpt_path=save.path, options=options, warmup_steps=11) == rates[resume:]


@pytest.mark.parametrize("resume", [8, 12])
def test_the_warm_up_rises_evenly_where_the_batch_grows(tmp_path, resume):
    grow = {"schedule": {0: 200, 1: 800}, "max_micro_batch": 200}
    options, save = {"max_epochs": 5}, SaveAfter(resume, tmp_path / "at.ckpt")  # 7 steps, and 2 in the epochs after it
    rates = climb(digits(), DynamicBatchSize(**grow), save, options=options, warmup_steps=10)
    assert len(rates) == 15
    smooth(rates, 10)
    again = climb(digits(), DynamicBatchSize(**grow), ckpt_path=save.path, options=options, warmup_steps=10)
    assert again == rates[resume:]
    # In epochs, where the run ends with a step: two epochs are 7 steps and 2.
    rates = climb(digits(), DynamicBatchSize(**grow), options={"max_epochs": -1, "max_steps": 15}, warmup_epochs=2)
    assert rates[7] == pytest.approx(0.5)
    assert rates[9] == pytest.approx(1.0)
    assert all(later > sooner for sooner, later in itertools.pairwise(rates[:10]))
    assert all(later < sooner for sooner, later in itertools.pairwise(rates[9:]))


def digits():
    return DigitsData(image_size=8, batch_size=200)


def test_the_scheduler_scales_each_group_from_its_own_rate():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.5)]
    optimizer, trainer = torch.optim.SGD(groups, lr=1.0), run()
    scheduler = optim.scheduled(optimizer, trainer, "cosine", warmup_epochs=1, start=0.1)["lr_scheduler"]["scheduler"]
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.05]
    trainer.fit_loop.epoch_loop.batch_progress.current.ready = 5
    optimizer.step()
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.55, 0.275])


def test_norms_biases_and_what_the_model_exempts_do_not_decay():
    model = vit()
    groups = {g["name"]: g for g in optim.parameter_groups(model, weight_decay=0.1)}
    names = {id(p): n for n, p in model.named_parameters()}
    free = {names[id(p)] for p in groups["no_decay"]["params"]}
    assert {"pos_embed", "cls_token", "norm.weight", "head.bias", "blocks.0.norm1.weight"} <= free
    decayed = {names[id(p)] for p in groups["decay"]["params"]}
    assert decayed == {
        "patch_embed.proj.weight",
        "head.weight",
        *(f"blocks.{i}.{n}.weight" for i in range(2) for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
    }
    theirs = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    assert {frozenset(map(id, g["params"])) for g in theirs} == {
        frozenset(map(id, g["params"])) for g in groups.values()
    }


@pytest.mark.parametrize("name", ["vit", "resnet18"])
def test_layer_decay_is_timms(name):
    model = vit() if name == "vit" else timm.create_model(name)
    exempt = model.no_weight_decay() if name == "vit" else ()
    ours = optim.parameter_groups(model, weight_decay=0.1, layer_decay=0.7)
    theirs = param_groups_layer_decay(model, 0.1, no_weight_decay_list=exempt, layer_decay=0.7)
    scales = {id(p): (g["lr_scale"], g["weight_decay"]) for g in theirs for p in g["params"]}
    assert {id(p): (g["lr_scale"], g["weight_decay"]) for g in ours for p in g["params"]} == scales
    optimizer = optim.build_optimizer(model, "adamw", lr=2.0, weight_decay=0.1, layer_decay=0.7)
    for group in optimizer.param_groups:
        assert group["lr"] == 2.0 * group["lr_scale"]
    if name == "vit":  # stem, two blocks, head
        assert {g["lr_scale"] for g in ours} == {1.0, 0.7, 0.7**2, 0.7**3}


def test_layer_decay_needs_named_layers():
    with pytest.raises(DloError, match="got Linear without; leave layer_decay out"):
        optim.parameter_groups(nn.Linear(2, 2), weight_decay=0.1, layer_decay=0.5)


@pytest.mark.parametrize(
    ("name", "kind", "args"),
    [
        ("adamw", torch.optim.AdamW, {"betas": [0.9, 0.95], "fused": True}),
        ("momentum", torch.optim.SGD, {"momentum": 0.8}),
        ("sgd", torch.optim.SGD, {}),
        ("muon", torch.optim.Optimizer, {}),
        ("lookahead_adamw", torch.optim.Optimizer, {}),
    ],
)
def test_optimizers_are_built_by_name(name, kind, args):
    optimizer = optim.build_optimizer(vit(), name, lr=1e-3, weight_decay=0.1, args=args)
    assert isinstance(optimizer, kind)
    for key, value in args.items():
        assert list(np.atleast_1d(optimizer.param_groups[0][key])) == list(np.atleast_1d(value))


def test_muon_leaves_the_first_and_last_layer_to_its_adamw():
    model = vit()
    optimizer = optim.build_optimizer(model, "muon", lr=1e-3, weight_decay=0.1)
    names = {id(p): n for n, p in model.named_parameters()}
    hidden = {names[id(p)] for g in optimizer.param_groups if not g.get("use_fallback") for p in g["params"]}
    assert {"blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.weight"} <= hidden
    assert not {"head.weight", "patch_embed.proj.weight", "pos_embed"} & hidden


def test_any_class_can_be_named_by_its_path_or_once_it_is_imported():
    built = optim.build_optimizer(nn.Linear(2, 2), "torch.optim.RAdam", lr=0.1, weight_decay=0.2, args={"eps": 1e-5})
    assert type(built) is torch.optim.RAdam
    assert [group["weight_decay"] for group in built.param_groups] == [0.2, 0.0]
    assert built.param_groups[0]["eps"] == 1e-5
    from dlo_plugins.compression.one_bit import OneBitAdam

    built = optim.build_optimizer(nn.Linear(2, 2), "OneBitAdam", lr=0.1, weight_decay=0.2, args={"freeze_step": 3})
    assert isinstance(built, OneBitAdam)
    assert optim.optimizer_class("adamw") is None  # timm's


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.optim.AdamV", "path of an optimizer class"),
        ("torch.nn.Linear", "path of an optimizer class"),
        ("torch.optimm.Adam", "cannot be imported"),
        ("nowhere.Optimizer", "is refused"),
        ("torch.hub.load", "is refused|path of an optimizer class"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(name, message):
    with pytest.raises(DloError, match=message):
        optim.check_optimizer(name)


@pytest.mark.parametrize(
    ("name", "value"), [("warmup_epochs", -1), ("weight_decay", -0.1), ("layer_decay", 1.5), ("lr", math.nan)]
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(DloError, match=f"{name} must be .*, got {value}"):
        optim.check_values(**{name: value})
    optim.check_values(warmup_epochs=0, warmup_steps=0, weight_decay=0.0, layer_decay=1.0)


def test_wrong_names_say_what_is_near():
    with pytest.raises(DloError, match=r"unknown optimizer 'WholeNorm'; available: .*adamw.*; or the path of a class"):
        optim.check_optimizer("WholeNorm")
    with pytest.raises(DloError, match=r"optimizer_args must be arguments of optimizer 'sgd', .*beta"):
        optim.build_optimizer(nn.Linear(2, 2), "sgd", lr=1.0, weight_decay=0.0, args={"beta": 1})
    with pytest.raises(DloError, match=r"arguments of optimizer 'sgd', .*momentum.*: Invalid momentum"):
        optim.build_optimizer(nn.Linear(2, 2), "sgd", lr=1.0, weight_decay=0.0, args={"momentum": -1.0})


# --- the learning rate follows the batch: linear, by its root, with accumulation, growth and the schedules ----------


class Rates(Callback):
    """Keeps the rates inside the steps, where DynamicBatchSize has multiplied them."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_start(self, trainer, pl_module) -> None:
        trainer.optimizers[0].register_step_pre_hook(lambda opt, *_: self.found.append(opt.param_groups[0]["lr"]))


def rates(*callbacks, accumulate=None, steps=6, batch_size=100, **options) -> list[float]:
    module = ImageClassifier(
        "vit_tiny_patch16_224", model_args=TINY | {"img_size": 8}, lr=0.01, log_images=0, **options
    )
    watch = Rates()
    more: dict = {} if accumulate is None else {"accumulate_grad_batches": accumulate}
    more |= {"max_epochs": -1, "max_steps": steps, "limit_val_batches": 0, "callbacks": [*callbacks, watch]}
    trainer = quiet_trainer(**more)
    trainer.fit(module, datamodule=DigitsData(image_size=8, batch_size=batch_size))
    return watch.found


def test_the_rate_is_that_of_the_samples_of_a_step() -> None:
    linear = {"reference_batch": 50}
    assert rates(lr_scaling=linear, schedule="constant", steps=2) == pytest.approx([0.02] * 2)
    assert rates(lr_scaling=linear, schedule="constant", steps=2, accumulate=2) == pytest.approx([0.04] * 2)
    root = {"reference_batch": 25, "rule": "sqrt"}
    assert rates(lr_scaling=root, schedule="constant", steps=2) == pytest.approx([0.02] * 2)


def test_the_warm_up_rises_from_its_own_rate_and_the_decay_ends_at_the_scaled_one() -> None:
    found = rates(
        lr_scaling={"reference_batch": 25}, schedule="linear", warmup_steps=2, warmup_lr=0.01, min_lr=0.002, steps=6
    )
    assert found[:3] == pytest.approx([0.01, 0.025, 0.04])
    plain = rates(schedule="linear", warmup_steps=2, warmup_lr=0.0025, min_lr=0.002, steps=6)
    assert found[2:] == pytest.approx([4 * rate for rate in plain[2:]])


def test_one_cycle_peaks_at_the_scaled_rate_and_growth_goes_on_from_it() -> None:
    peak = max(rates(OneCycle(pct_start=0.5), lr_scaling={"reference_batch": 50}, schedule="constant"))
    assert peak == pytest.approx(0.02, rel=0.1)
    assert peak == pytest.approx(2 * max(rates(OneCycle(pct_start=0.5), schedule="constant")))
    growth = DynamicBatchSize(schedule={0: 100, 1: 400}, lr_rule="linear")
    grown = rates(growth, lr_scaling={"reference_batch": 50}, schedule="constant", steps=22)
    assert grown[0] == pytest.approx(0.02)
    assert grown[-1] == pytest.approx(0.08)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DloError, match=r"warmup_lr must be at most the scaled lr, got 1 times lr .* factor 0.5"):
        rates(lr_scaling={"reference_batch": 200}, schedule="linear", warmup_lr=0.01, warmup_steps=2)
    module = ImageClassifier(
        "vit_tiny_patch16_224", model_args=TINY | {"img_size": 8}, num_classes=10, lr_scaling={"reference_batch": 2}
    )
    module.check(None)
    module.configure_model()
    with pytest.raises(DloError, match="lr_scaling must have a datamodule of dlo"):
        module.configure_optimizers()
