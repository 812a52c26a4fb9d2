import copy

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.run.resume import ExactResume
from support.runs import Watch
from support.trainers import quiet_trainer

BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Net(LightningModule):
    """Every batch is the same, so where in an epoch a run resumes shows only in its state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        return (self.layer(batch) - 2).square().mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append(weights(self))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def loader(batches: int = 5) -> DataLoader:
    return DataLoader([BATCH] * batches, batch_size=None)


def run(tmp_path, *callbacks: Callback, decay: float = 0.8, **options) -> Trainer:
    return quiet_trainer(
        default_root_dir=tmp_path,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        num_sanity_val_steps=0,
        callbacks=[WeightEMA(decay), *callbacks],
        **options,
    )


class Reference(Callback):
    """torch's own averaging, updated after each optimizer step."""

    def on_train_start(self, trainer, pl_module):
        self.model = AveragedModel(
            copy.deepcopy(pl_module.layer), multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True
        )
        self.trained: list[torch.Tensor] = []
        self.step = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.model.update_parameters(pl_module.layer)
            self.trained.append(weights(pl_module))


def test_it_is_torchs_average_which_validation_sees_and_training_goes_on_with_the_weights(tmp_path):
    net, plain, reference = Net(), Net(), Reference()
    run(tmp_path, reference, max_epochs=2, accumulate_grad_batches=2).fit(net, loader(4), loader(1))
    assert torch.equal(weights(net), weights(reference.model))
    assert torch.equal(net.layer[1].running_mean, reference.model.module[1].running_mean)
    assert net.layer[1].num_batches_tracked == 8
    optimizer = plain.configure_optimizers()
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            (plain.training_step(BATCH, 0) / 2).backward()
        optimizer.step()
    assert torch.equal(reference.trained[-1], weights(plain))
    assert torch.equal(net.seen[-1], weights(net))
    assert not torch.equal(net.seen[-1], reference.trained[-1])


class Single(Callback):
    """The average of half-precision weights, by its definition in fp32."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = [p.detach().float() for p in pl_module.parameters()]
        last = getattr(self, "average", now)
        self.average = [old + (new - old) * (1 - 0.99) for old, new in zip(last, now, strict=True)]


class Half(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def test_of_weights_in_half_precision_the_average_has_single_precision(tmp_path):
    """A bfloat16 has 8 digits: a hundredth of a step, added to one, would be lost."""
    options = {"max_epochs": 10, "decay": 0.99, "precision": "bf16-true"}
    whole, resumed, single = Half(), Half(), Single()
    path, late = tmp_path / "mid.ckpt", loader(10)
    first, second = run(tmp_path, single, Watch(path, 57), **options), run(tmp_path, **options)
    first.fit(whole, late, loader(1))
    moved = [(a - s).abs().max() for a, s in zip(single.average, Half().parameters(), strict=True)]
    assert min(moved) > 0.01
    for found, expected in zip(whole.parameters(), single.average, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.detach(), expected.bfloat16())
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint["averaging_rest"]) == {"1", "2"}
    second.fit(resumed, late, loader(1), ckpt_path=path, weights_only=True)
    assert torch.equal(weights(resumed), weights(whole))
    assert all(torch.equal(a, b) for a, b in zip(resumed.seen[-4:], whole.seen[-4:], strict=True))
    averages = [next(c for c in t.callbacks if isinstance(c, WeightEMA))._average for t in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*averages, strict=True)), "all digits of it go on"


def test_a_run_resumed_in_mid_epoch_is_bit_equal(tmp_path):
    whole, resumed = Net(), Net()
    path = tmp_path / "mid.ckpt"
    run(tmp_path, Watch(path, 7), max_epochs=3).fit(whole, loader(), loader(1))
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["averaging_state"] == {"n_averaged": 7}
    assert not torch.equal(
        checkpoint["state_dict"]["layer.0.weight"], checkpoint["current_model_state"]["layer.0.weight"]
    )
    run(tmp_path, max_epochs=3).fit(resumed, loader(), loader(1), ckpt_path=path, weights_only=True)
    assert torch.equal(weights(resumed), weights(whole))
    assert torch.equal(resumed.seen[-1], whole.seen[-1])


def test_a_checkpoint_of_a_finished_run_can_be_trained_on(tmp_path):
    whole, part = Net(), Net()
    run(tmp_path, max_epochs=4).fit(whole, loader(), loader(1))
    first = run(tmp_path, max_epochs=2)
    first.fit(part, loader(), loader(1))
    first.save_checkpoint(tmp_path / "end.ckpt")
    run(tmp_path, max_epochs=4).fit(part, loader(), loader(1), ckpt_path=tmp_path / "end.ckpt", weights_only=True)
    assert torch.equal(weights(part), weights(whole))


class First(Callback):
    """Records the weights before the first step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.weights = getattr(self, "weights", weights(pl_module))


def test_a_run_without_the_average_goes_on_from_the_trained_weights(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("dlo_framework.run.resume.rank_zero_info", said.append)
    path, reference = tmp_path / "mid.ckpt", Reference()
    run(tmp_path, Watch(path, 7), reference, max_epochs=3).fit(Net(), loader(), loader(1))
    dropped, kept = Net(), Net()
    for module, callbacks in ((dropped, [ExactResume()]), (kept, [ExactResume(), WeightEMA(0.8)])):
        first = First()
        trainer = run(tmp_path, max_epochs=3)
        trainer.callbacks = [*callbacks, first]
        trainer.fit(module, loader(), ckpt_path=path, weights_only=True)
        assert torch.equal(first.weights, reference.trained[6])
        assert ("training goes on from the trained weights" in "".join(said)) == (module is dropped)
        said.clear()
    assert torch.equal(weights(dropped), reference.trained[-1])
    assert not torch.equal(weights(kept), weights(dropped))
    # A reader of the run's result reads the average.
    trainer = run(tmp_path)
    trainer.callbacks = [ExactResume()]
    trainer.validate(dropped, loader(1), ckpt_path=path, verbose=False, weights_only=True)
    assert not torch.equal(dropped.seen[-1], reference.trained[6])


class Stop(Callback):
    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        raise RuntimeError("stop in validation")


def test_a_checkpoint_saved_on_an_error_in_validation_holds_both(tmp_path):
    net, reference = Net(), Reference()
    saver = ModelCheckpoint(tmp_path, filename="err", save_on_exception=True, enable_version_counter=False)
    with pytest.raises(RuntimeError, match="stop in validation"):
        run(tmp_path, reference, Stop(), saver, max_epochs=1).fit(net, loader(4), loader(1))
    checkpoint = torch.load(tmp_path / "err.ckpt", weights_only=True)
    trained, average = Net(), Net()
    trained.load_state_dict(checkpoint["current_model_state"])
    average.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(weights(trained), reference.trained[-1])
    assert torch.equal(weights(average), weights(reference.model))


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_outside_its_range_is_refused(decay):
    with pytest.raises(DloError, match=r"must be at least 0 and below 1, got"):
        WeightEMA(decay)
