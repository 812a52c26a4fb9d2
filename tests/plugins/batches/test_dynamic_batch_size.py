import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.data import Position, ResumableDataModule
from dlo_framework.errors import DloError
from dlo_framework.progress import parse_position
from dlo_plugins.batches.dynamic_batch_size import (
    DynamicBatchSize,
    LRDecay,
    NoiseEstimate,
    NoiseScale,
    noise_and_signal,
    window,
)
from dlo_plugins.schedules.lr_curves import OneCycle
from support.runs import StopAt, fit_with_defaults
from support.trainers import quiet_trainer

SAMPLES = 70


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(x, x.sum(1) + torch.randn(SAMPLES, generator=generator), torch.arange(SAMPLES))


class Data(ResumableDataModule):
    def __init__(self, batch_size: int = 8, workers: int = 0) -> None:
        super().__init__(batch_size=batch_size, num_workers=workers, seed=5)

    def train_dataloader(self):
        return self.train_loader(samples())

    def val_dataloader(self):
        return self.eval_loader(samples())


class Net(LightningModule):
    """Remembers the samples of each optimizer step, how many batches they came in, and the rate of the step."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        self.steps: list[tuple[list[int], int, float]] = []
        self.losses: list[float] = []
        self._seen: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        self._seen.append(batch[2].tolist())
        loss = (self.net(batch[0])[:, 0] - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0])[:, 0] - batch[1]).square().mean())

    def on_before_optimizer_step(self, optimizer):
        seen, self._seen = self._seen, []
        samples = [index for batch in seen for index in batch]
        self.steps.append((samples, len(seen), optimizer.param_groups[0]["lr"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    @property
    def sizes(self) -> list[int]:
        return [len(samples) for samples, _, _ in self.steps]


def fit(*callbacks, data=None, loader=None, module=None, **options):
    torch.manual_seed(1)
    module = module or Net()
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_epochs": 4, **options})
    trainer.fit(module, data or Data() if loader is None else loader)
    return module


def test_the_steps_follow_the_schedule_and_each_epoch_visits_each_sample_once():
    module = fit(DynamicBatchSize({"50%": 16, 3: 32}, max_micro_batch=16))
    # 70 samples: 8 steps of 8, with 6 left out; then 4 of 16; then 2 of 32 in two batches each.
    assert module.sizes == [8] * 16 + [16] * 4 + [32] * 2
    assert [batches for _, batches, _ in module.steps] == [1] * 20 + [2] * 2
    assert len(module.losses) == 16 + 4 + 4
    for first, past in ((0, 8), (8, 16), (16, 20), (20, 22)):
        seen = [index for samples, _, _ in module.steps[first:past] for index in samples]
        assert len(set(seen)) == len(seen) == 64
    assert {rate for _, _, rate in module.steps} == {0.01}


def test_micro_batches_give_the_weights_of_whole_batches():
    """Also in an epoch's last window, which has 24 samples for 40."""
    schedule = {0: 32, "25%": 40}
    whole = fit(DynamicBatchSize(schedule)).state_dict()
    parts = fit(DynamicBatchSize(schedule, max_micro_batch=8))
    assert parts.sizes == [32, 32] + [40, 24] * 3
    for name, value in parts.state_dict().items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("sqrt", 2**0.5), ("linear", 2)])
def test_the_rate_follows_the_batch_by_the_rule(rule, factor):
    module = fit(DynamicBatchSize({"50%": 16}, lr_rule=rule), max_epochs=2)
    rates = [rate for _, _, rate in module.steps]
    assert rates == [0.01] * 8 + [pytest.approx(0.01 * factor)] * 4


def test_a_scheduler_sees_its_own_rate_and_not_the_scaled_one():
    class Decaying(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            # Its next rate is computed from the present one, so that a factor left in it would compound.
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = fit(DynamicBatchSize({"50%": 16}, lr_rule="linear"), module=Decaying(), max_epochs=2)
    rates = [rate for _, _, rate in module.steps]
    assert rates == pytest.approx([0.01 * 0.9**step * (2 if step >= 8 else 1) for step in range(12)])


def test_growth_stands_in_for_decay_until_the_batch_is_at_its_largest():
    decay = LRDecay(factor=0.5, at=[1, 2, 3], max_batch_size=16)
    module = fit(DynamicBatchSize(decay_to_growth=decay))
    assert module.sizes == [8] * 8 + [16] * 12
    assert [rate for _, _, rate in module.steps] == pytest.approx([0.01] * 12 + [0.005] * 4 + [0.0025] * 4)


@pytest.mark.parametrize("first", [True, False])
def test_one_cycle_goes_by_samples_whatever_the_batch(first):
    cycle, sizes = OneCycle(0.1), DynamicBatchSize({"50%": 32}, max_micro_batch=8)
    module = fit(*([cycle, sizes] if first else [sizes, cycle]))
    before = [step / 8 / 4 for step in range(16)]
    after = [(2 + step / 2) / 4 for step in range(4)]
    assert [rate for _, _, rate in module.steps] == pytest.approx([0.1 * cycle.lr_factor(x) for x in before + after])


def test_with_a_plain_loader_accumulation_carries_all_growth():
    loader = DataLoader(samples(), batch_size=10)
    module = fit(DynamicBatchSize({"50%": 30}), loader=loader, max_epochs=2)
    assert module.sizes == [10] * 7 + [30, 30, 10]
    assert [batches for _, batches, _ in module.steps] == [1] * 7 + [3, 3, 1]


def test_validation_within_an_epoch_keeps_to_its_fraction():
    class Count(Callback):
        places: list[int]

        def on_train_start(self, *_):
            self.places = []

        def on_validation_start(self, trainer, *_):
            self.places.append(trainer.global_step)

    count = Count()
    fit(DynamicBatchSize({1: 16}), count, val_check_interval=0.5, max_epochs=2, num_sanity_val_steps=0)
    assert count.places == [4, 8, 10, 12]


def test_the_noise_scale_decides_and_never_shrinks():
    class Net2(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.02)

    noise = NoiseScale(max_batch_size=64, every=4, smoothing=0.5)
    module = fit(DynamicBatchSize(noise_scale=noise, max_micro_batch=8), module=Net2(), max_epochs=40)
    full = [size for size in module.sizes if size in (8, 16, 32, 64)]
    assert module.sizes[0] == 8
    assert all(batches >= 2 for samples, batches, _ in module.steps if len(samples) in (8, 16, 32, 64))
    # The regression's noise outweighs its signal as it converges.
    assert full[-1] > 8
    changes = [size for size, before in zip(full[1:], full, strict=False) if size != before]
    assert changes == sorted(changes)


# --- resuming ----------------------------------------------------------------------------------------------


def run(folder, callback, *, stop=None, crash=False, resume=False, workers=0):
    torch.manual_seed(99 if resume else 1)
    module = Net(dropout=0.2)
    callbacks = [OneCycle(0.02), callback, *([StopAt(stop, crash)] if stop else [])]
    fit_with_defaults(folder, module, Data(workers=workers), callbacks, resume=resume, max_epochs=6)
    return module.losses


GROWING = {"24 samples": 16, 2: 32, "3.5 epochs": 64}
SHRINKING = {0: 32, 2: 16, 4: 8}


@pytest.mark.parametrize(
    ("schedule", "limit", "stops", "crash", "at"),
    [
        # Stops in mid-window, at boundaries of the schedule, and at edges of epochs: of 6, then 4 batches;
        (GROWING, 16, [1, 11], 8, 6),
        # of 2, 2, 4, 4, 8, 8 batches.
        (SHRINKING, None, [5], 6, 4),
    ],
)
def test_stopped_or_crashed_anywhere_and_resumed(tmp_path, schedule, limit, stops, crash, at):
    """A crash is in the second batch of the epoch after ``at`` batches, whose length differs from that before."""

    def callback():
        return DynamicBatchSize(schedule, max_micro_batch=limit, lr_rule="sqrt")

    whole = run(tmp_path / "whole", callback())
    assert len(set(whole)) == len(whole)
    for stop in stops:
        folder = tmp_path / str(stop)
        before = run(folder, callback(), stop=stop)
        assert before == whole[: len(before)]
        assert stop <= len(before) < len(whole), stop
        after = run(folder, callback(), resume=True, workers=2 if stop == stops[0] else 0)
        assert before + after == whole, stop
    run(tmp_path / "cut", callback(), stop=crash, crash=True)
    assert run(tmp_path / "cut", callback(), resume=True) == whole[at + 1 :]


def by_noise():
    noise = NoiseScale(max_batch_size=64, every=1, smoothing=0.5, multiple=3)
    return DynamicBatchSize(noise_scale=noise, max_micro_batch=8)


def test_a_run_that_follows_the_noise_resumes_exactly(tmp_path):
    whole = run(tmp_path / "whole", by_noise())
    before = run(tmp_path / "stopped", by_noise(), stop=20)
    assert before + run(tmp_path / "stopped", by_noise(), resume=True) == whole


# --- after an exception ------------------------------------------------------------------------------------


class Crashes(Net):
    """Raises in a batch's ``training_step``, which at a step's last batch is within the optimizer's step."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def training_step(self, batch, batch_idx):
        if len(self.losses) == self.batch:
            raise RuntimeError("crash")
        return super().training_step(batch, batch_idx)


def growing():
    return DynamicBatchSize({"24 samples": 16, 2: 32}, max_micro_batch=16, lr_rule="sqrt")


@pytest.mark.parametrize(("make", "crash"), [(growing, 4), (by_noise, 7)])
@pytest.mark.parametrize("same_trainer", [True, False])
def test_a_fit_that_raised_leaves_nothing_to_the_next(make, crash, same_trainer):
    """The same trainer goes on with its epoch, so it fails in the first; another begins again wherever one failed."""
    expected = fit(make()).losses
    callback, data = make(), Data()
    trainer = quiet_trainer(callbacks=[callback], max_epochs=4)
    with pytest.raises(RuntimeError, match="crash"):
        trainer.fit(Crashes(crash if same_trainer else crash + 9), datamodule=data)
    optimizer = trainer.optimizers[0]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert data.window_at is None
    if not same_trainer:
        trainer = quiet_trainer(callbacks=[callback], max_epochs=4)
    torch.manual_seed(1)
    module = Net()
    trainer.fit(module, datamodule=data)
    assert module.losses == expected


def test_a_checkpoint_that_the_exception_saves_has_the_rate_unscaled_and_the_window(tmp_path):
    keep = ModelCheckpoint(tmp_path, filename="failed", save_on_exception=True)
    with pytest.raises(RuntimeError, match="crash"):
        fit(growing(), keep, module=Crashes(4), enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    (group,) = saved["optimizer_states"][0]["param_groups"]
    assert group["lr"] == 0.01
    assert not [name for name in group if name.startswith("dlo")]
    assert saved["callbacks"]["DynamicBatchSize"]["window"] == [1, 4, 0, 1, 1]


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        ({"50%": 16}, {"accumulate_grad_batches": 2}, r"trainer\.accumulate_grad_batches must not be set, .* got 2"),
        ({"50%": 16}, {"limit_train_batches": 3}, "limit_train_batches must not be set"),
        ({"50%": 16}, {"max_epochs": -1, "max_steps": 4}, r"trainer\.max_epochs must be set for a point in percent"),
        ({0: 25}, {"loader": DataLoader(samples(), batch_size=10)}, "got 25; set 30"),
        (NoiseScale(max_batch_size=4), {}, "at least the batch size of 8"),
        (NoiseScale(max_batch_size=64, every=0), {}, "every must be at least 1"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(callback, options, message):
    name = "noise_scale" if isinstance(callback, NoiseScale) else "schedule"
    with pytest.raises(DloError, match=message):
        fit(DynamicBatchSize(**{name: callback}), **options)


@pytest.mark.parametrize(
    ("text", "epochs"),
    [(3, 3.0), ("3", 3.0), ("1.5 epochs", 1.5), ("50%", 4.0), ("500 samples", 5.0), ("1_000 samples", 10.0), (0, 0.0)],
)
def test_points_in_a_run_of_eight_epochs_of_a_hundred_samples(text, epochs):
    point = parse_position(text, "x")
    assert point.epochs(100, 8) == epochs
    assert point.reached(Position(int(epochs), round(100 * (epochs % 1)), 100), 8)
    if epochs:
        before = round(100 * epochs) - 1
        assert not point.reached(Position(before // 100, before % 100, 100), 8)


@pytest.mark.parametrize("text", ["half", "-1", "50 %%", "3 days", "101%"])
def test_what_is_no_point_is_refused(text):
    with pytest.raises(DloError, match=r"^x: a point"):
        parse_position(text, "x")


@given(st.integers(1, 5000), st.none() | st.integers(1, 600), st.integers(1, 8), st.integers(1, 2))
def test_a_window_obeys_the_limit_and_the_ranks_and_wastes_little(size, limit, world, least):
    found = window(size, limit, world, least)
    assert found.batch_size % world == 0
    assert found.batches >= least
    if limit is not None:
        assert found.batch_size <= max(limit * world, world)
    total = found.batch_size * found.batches
    # Short of a micro-batch of one sample a rank, no step is larger than asked for, nor much smaller.
    if found.batch_size > world:
        assert size - found.batches * world < total <= size


def test_the_noise_scale_of_random_gradients_is_that_of_their_distribution():
    """Per-sample gradients N(mean, diag(variance)): the scale is sum(variance) / |mean|^2."""
    generator = torch.Generator().manual_seed(0)
    mean, variance = torch.linspace(0.1, 0.5, 20), torch.linspace(1, 4, 20)
    estimate = NoiseEstimate()
    for _ in range(60):
        samples = mean + variance.sqrt() * torch.randn(50, 64, 20, generator=generator)
        small = samples[:, :8].mean(1).square().sum(1).mean()
        large = samples.mean(1).square().sum(1).mean()
        estimate.add(*noise_and_signal(float(small), float(large), (8, 64)), 0.9)
    assert estimate.scale == pytest.approx(float(variance.sum() / mean.square().sum()), rel=0.1)
    assert estimate.weight == pytest.approx(1, abs=0.01)
