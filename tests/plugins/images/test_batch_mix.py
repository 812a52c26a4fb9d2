"""BatchMix in training: which batches it mixes, whose memory it writes to, and what it refuses."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dlo_framework.data import ResumableDataModule
from dlo_framework.errors import DloError
from dlo_framework.progress import AccumulationTail
from dlo_plugins.images.batch_mix import BatchMix, join_plans
from support.runs import StopAt, fit_with_defaults
from support.trainers import quiet_trainer

CLASSES, SAMPLES, BATCH = 3, 52, 5  # 10 batches of an odd size an epoch

Pair = namedtuple("Pair", "images labels")


class Images(Dataset):
    """Noise whose mean tells its class, and random in itself."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        return torch.full((1, 6, 6), float(index % CLASSES)) + 0.1 * torch.randn(1, 6, 6), index % CLASSES


class Data(ResumableDataModule):
    num_classes = CLASSES

    def __init__(self) -> None:
        super().__init__(batch_size=BATCH, num_workers=0, seed=3)

    def train_dataloader(self):
        return self.train_loader(Images())

    def val_dataloader(self):
        return self.eval_loader(Images())


class Net(LightningModule):
    """Remembers losses and batches; dropout draws from torch's generator, beside which BatchMix has its own."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.LazyLinear(CLASSES))
        self.net(torch.zeros(1, 36))
        self.losses: list[float] = []
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.evaluated: list[torch.Tensor] = []
        self.kinds: set[type] = set()
        for name, value in settings.items():
            setattr(self, name, value)

    def training_step(self, batch, batch_idx):
        self.kinds.add(type(batch))
        images, targets = batch.values() if isinstance(batch, dict) else batch
        self.seen.append((images.clone(), targets.clone()))
        loss = torch.nn.functional.cross_entropy(self.net(images), targets)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(callback=None, data=None, module=None, **options):
    """Returns the module after a short fit."""
    torch.manual_seed(1)
    module = module or Net()
    callbacks = callback if isinstance(callback, list) else [callback] if callback else []
    trainer = quiet_trainer(callbacks=[AccumulationTail(), *callbacks], **{"max_epochs": 1, **options})
    trainer.fit(module, data or Data())
    return module


def same(found, expected):
    """Whether two modules were given the same batches."""
    return all(same_batches(found, expected))


def same_batches(found, expected):
    """Which images of two modules' batches are the same, and their targets where they are of one kind."""
    pairs = zip(found.seen, expected.seen, strict=True)
    return [torch.equal(a[0], b[0]) and (a[1].dtype != b[1].dtype or torch.equal(a[1], b[1])) for a, b in pairs]


def loader(images=8, **options):
    x = torch.arange(float(images)).view(-1, 1, 1, 1).expand(-1, 1, 6, 6).clone()
    return DataLoader(TensorDataset(x, torch.arange(images) % CLASSES), batch_size=4, **options)


# --- what training sees ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_training_sees_soft_targets_and_validation_the_plain_ones(mode):
    plain, mixed = fit(), fit(BatchMix(mode=mode, label_smoothing=0.1))
    for (images, targets), (old_images, old_targets) in zip(mixed.seen, plain.seen, strict=True):
        assert images.shape == old_images.shape
        assert targets.dtype == torch.float32
        assert targets.shape == (BATCH, CLASSES)
        torch.testing.assert_close(targets.sum(1), torch.ones(BATCH))
        assert torch.equal(images[2], old_images[2])  # The middle of five.
        assert targets[2].argmax() == old_targets[2]
        assert not torch.equal(images, old_images)
    assert all(torch.equal(a, b) for a, b in zip(mixed.evaluated, plain.evaluated, strict=True))
    assert not mixed.evaluated[0].is_floating_point()


def test_dicts_and_named_tuples_keep_their_kind():
    rows = [(torch.full((1, 6, 6), float(i)), i % CLASSES) for i in range(8)]
    expected = fit(BatchMix(num_classes=CLASSES), DataLoader(rows, batch_size=4))
    dicts = DataLoader([{"photo": x, "label": y} for x, y in rows], batch_size=4)
    named = DataLoader([Pair(*row) for row in rows], batch_size=4)
    keys = {"image_key": "photo", "target_key": "label"}
    for data, options, kind in ((dicts, keys, dict), (named, {}, Pair)):
        module = fit(BatchMix(num_classes=CLASSES, **options), data)
        assert module.kinds == {kind}
        assert same(module, expected)


def test_multi_hot_targets_are_mixed_as_they_are():
    images, targets = torch.randn(4, 1, 6, 6), torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1]])
    callback = BatchMix(multi_label=True, label_smoothing=0.1, seed=1)
    module = fit(callback, DataLoader(TensorDataset(images, targets), batch_size=4))
    lam = torch.from_numpy(callback.plan(0, 0, images.shape).lam).float()[:, None]
    smooth = targets * 0.9 + 0.05
    torch.testing.assert_close(module.seen[0][1], smooth * lam + smooth.flip(0) * (1 - lam))


def test_the_last_epochs_are_not_mixed_but_their_targets_are_still_smooth():
    plain, mixed = fit(max_epochs=3), fit(BatchMix(off_epochs=2, label_smoothing=0.1), max_epochs=3)
    assert same_batches(mixed, plain) == [False] * 10 + [True] * 20
    assert mixed.seen[-1][1].unique().tolist() == pytest.approx([0.1 / 3, 0.9 + 0.1 / 3])


def test_a_short_last_window_does_not_end_the_mixing_early():
    """Ten batches by four are three steps an epoch: twelve are four epochs, of which three are mixed."""
    options = {"max_epochs": -1, "max_steps": 12, "accumulate_grad_batches": 4}
    plain, mixed = (fit(c, **options) for c in ([], [BatchMix(off_epochs=1)]))
    assert same_batches(mixed, plain) == [False] * 30 + [True] * 10


# --- whose memory ------------------------------------------------------------------------------------------------


class SameBatches(Dataset):
    """Whole batches that it keeps."""

    def __init__(self) -> None:
        self.images, self.targets = torch.arange(16.0).view(4, 4, 1, 1).repeat(1, 1, 6, 6), torch.arange(4) % CLASSES

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.images[:, :1], self.targets


@pytest.mark.parametrize("layout", ["views", "contiguous"])
def test_a_dataset_that_keeps_its_batches_is_not_changed(layout):
    def run(in_place):
        dataset = SameBatches()
        if layout == "contiguous":
            dataset.images = dataset.images[:, :1].contiguous()
        before = dataset.images.clone()
        callback = BatchMix(num_classes=CLASSES, in_place=in_place)
        module = fit(callback, DataLoader(dataset, batch_size=None), max_epochs=2)
        return torch.equal(dataset.images, before), module.seen[0][0]

    (kept, seen), (promised, same) = run(None), run(True)
    assert kept
    assert torch.equal(seen, same)
    assert promised == (layout == "views")  # A promise that does not hold shows; a part of an image is copied anyway.


class Spy(BatchMix):
    """Tells whether the images it returns are in the memory of those it was given."""

    def transform(self, trainer, pl_module, batch):
        mixed = super().transform(trainer, pl_module, batch)
        self.in_their_place = mixed[0].data_ptr() == batch[0].data_ptr()
        return mixed


@pytest.mark.parametrize(("options", "expected"), [({}, True), ({"in_place": False}, False)])
@pytest.mark.parametrize("make", [loader, Data])
def test_a_batch_that_was_collated_for_training_is_mixed_in_place(make, options, expected):
    data = make()
    spy = Spy(num_classes=CLASSES, **options)
    fit(spy, data)
    assert spy.in_their_place is expected
    if isinstance(data, DataLoader):
        assert torch.equal(data.dataset.tensors[0][:, 0, 0, 0], torch.arange(8.0))


# --- random numbers ----------------------------------------------------------------------------------------------


def test_draws_follow_the_seed_alone(monkeypatch):
    first = fit(BatchMix())
    assert same(fit(BatchMix()), first)
    assert same(fit(BatchMix(), accumulate_grad_batches=3, val_check_interval=2), first)
    assert not same(fit(BatchMix(seed=7)), first)
    assert same(fit(BatchMix(seed=1)), first)  # fit calls torch.manual_seed(1)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert same(fit(BatchMix()), fit(BatchMix(seed=7)))
    callback = BatchMix()
    assert same(fit(callback), fit(callback))  # A new run with the same object begins again.


def test_ranks_and_batches_draw_differently_and_groups_do_not_depend_on_ranks():
    callback = BatchMix(mode="elem", group_size=4)
    shape = torch.Size([4, 1, 6, 6])
    plans = [callback.plan(number, rank, shape) for number in range(3) for rank in range(2)]
    assert len({tuple(plan.lam) for plan in plans}) == 6
    one = callback.plan(1, 0, torch.Size([8, 1, 6, 6]))
    two = join_plans([callback.plan(1, rank, shape) for rank in range(2)])
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert one.partner.tolist() == [3, 2, 1, 0, 7, 6, 5, 4]


def test_a_batch_whose_step_raised_is_drawn_again():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    callback = BatchMix(seed=5)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(callback, module=Fails())
    assert callback.state_dict() == {"seed": 5, "batches": 4, "steps": 0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    losses = stopped(tmp_path_factory.mktemp("whole"))
    assert len(set(losses)) == 30
    return losses


def stopped(folder, *more, resume=False):
    """Returns the losses of a fit with dlo's default callbacks."""
    torch.manual_seed(1 if not resume else 99)
    module, callbacks = Net(), [BatchMix(mode="pair", off_epochs=1), *more]
    fit_with_defaults(folder, module, Data(), callbacks, resume=resume, max_epochs=3, accumulate_grad_batches=3)
    return module.losses


# In mid-epoch and in the middle of a window; at an epoch's end; where mixing ends; after it.
@pytest.mark.parametrize(("stop", "at"), [(5, 6), (10, 10), (20, 20), (22, 23)])
def test_a_run_that_is_stopped_goes_on_with_the_same_losses(whole, tmp_path, stop, at):
    assert stopped(tmp_path / "run", StopAt(stop)) == whole[:at]
    assert stopped(tmp_path / "run", resume=True) == whole[at:]


# --- what is refused ---------------------------------------------------------------------------------------------


def test_label_smoothing_twice_is_refused_before_training():
    for module in (Net(label_smoothing=0.2), Net()):
        if not hasattr(module, "label_smoothing"):
            module.hparams["label_smoothing"] = 0.2
        with pytest.raises(DloError, match=r"got 0.1 in BatchMix and 0.2 in Net"):
            fit(BatchMix(label_smoothing=0.1), module=module)
        assert module.losses == []
        fit(BatchMix(), module=module)


def test_smooth_targets_that_a_threshold_does_not_tell_apart_are_refused():
    for threshold in (0.0, 0.02, 0.95):
        module = Net(bce_threshold=threshold)
        with pytest.raises(DloError, match=f"bce_threshold .* got {threshold}; set label_smoothing to 0"):
            fit(BatchMix(label_smoothing=0.1), module=module)
        assert module.losses == []
    fit(BatchMix(), module=module)
    fit(BatchMix(label_smoothing=0.1), module=Net(bce_threshold=0.2))


NAMED, INTEGERS = {"photos": torch.zeros(1, 2, 2), "target": 1}, (torch.zeros(1, 2, 2, dtype=torch.uint8), 1)


@pytest.mark.parametrize(
    ("callback", "data", "message"),
    [
        (BatchMix(), loader(), r"set num_classes \(the first batch has classes up to 2\)"),
        (BatchMix(num_classes=2), loader(), r"0\.\.1, got 0\.\.2 in the first batch"),
        (BatchMix(num_classes=4), Data(), "num_classes must be the same everywhere, got BatchMix 4, Data 3"),
        (BatchMix(num_classes=3, multi_label=True), loader(), "multi_label targets must be dense"),
        (BatchMix(num_classes=3, image_key="fotos"), DataLoader([NAMED] * 4), "'fotos'; did you mean 'photos'"),
        (
            BatchMix(num_classes=3),
            DataLoader([INTEGERS] * 4),
            r"floating-point images .* got torch.uint8 \[1, 1, 2, 2\]",
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused_at_the_first_one(callback, data, message):
    with pytest.raises(DloError, match=message):
        fit(callback, data)
