"""The learning rate follows the batch: linear, by its root, with accumulation, growth and the schedules."""

import pytest
from lightning.pytorch import Callback

from dlo_framework.errors import DloError
from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize
from dlo_plugins.schedules.lr_curves import OneCycle
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer

TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


class Rates(Callback):
    """Keeps the rates inside the steps, where DynamicBatchSize has multiplied them."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_start(self, trainer, pl_module) -> None:
        trainer.optimizers[0].register_step_pre_hook(lambda opt, *_: self.found.append(opt.param_groups[0]["lr"]))


def rates(*callbacks, accumulate=None, steps=6, batch_size=100, **options) -> list[float]:
    module = ImageClassifier("vit_tiny_patch16_224", model_args=TINY, lr=0.01, log_images=0, **options)
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
    module = ImageClassifier("vit_tiny_patch16_224", model_args=TINY, num_classes=10, lr_scaling={"reference_batch": 2})
    module.check(None)
    module.configure_model()
    with pytest.raises(DloError, match="lr_scaling must have a datamodule of dlo"):
        module.configure_optimizers()
