"""Callbacks that change training batches, and batches of any structure."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelSummary
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dlo_framework.batch_transform import BatchTransform, batches_are_new
from dlo_framework.batches import batch_size, find_batch_size, slice_batch
from dlo_framework.data import ResumableLoader
from support.trainers import quiet_trainer


class Add(BatchTransform):
    """Adds a number to the inputs, whatever the form of the batch."""

    def __init__(self, value: float, order: int = 0) -> None:
        self.value, self.order = value, order

    @property
    def state_key(self) -> str:
        return f"Add{self.value}"

    def transform(self, trainer, pl_module, batch):
        assert trainer.training
        assert pl_module is trainer.lightning_module
        return [batch[0] + self.value, *batch[1:]]


class Times(Add):
    @property
    def state_key(self) -> str:
        return "Times"

    def transform(self, trainer, pl_module, batch):
        return [batch[0] * self.value, *batch[1:]]


class Watch(Callback):
    """Records the inputs of the hooks."""

    def __init__(self) -> None:
        self.started: list[float] = []
        self.ended: list[float] = []
        self.evaluated: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.started.append(inputs(batch)[0].item())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ended.append(inputs(batch)[0].item())

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append(inputs(batch)[0].item())


def inputs(batch):
    return batch["x"] if isinstance(batch, dict) else batch[0]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.trained: list[float] = []

    def training_step(self, batch, batch_idx):
        self.trained.append(inputs(batch)[0].item())
        if inputs(batch)[0] < 0:
            raise RuntimeError("a negative input")
        return self.net(inputs(batch)[:, None]).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class NetWithHook(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, *batch[1:]]


class Dicts(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"x": torch.tensor(float(index)), "y": index}


class Data(LightningDataModule):
    def train_dataloader(self):
        return tensors()

    def val_dataloader(self):
        return tensors()


class DataWithHook(Data):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, *batch[1:]]


def tensors():
    return DataLoader(TensorDataset(torch.arange(3.0), torch.zeros(3)))


def trainer_with(*callbacks, **options):
    return quiet_trainer(max_epochs=1, num_sanity_val_steps=2, callbacks=list(callbacks), **options)


def fit(module, *callbacks, data=None, **loaders):
    watch = Watch()
    trainer = trainer_with(*callbacks, watch)
    trainer.fit(module, datamodule=data, **loaders)
    assert "batch_to_device" not in vars(trainer.strategy)
    return module.trained, watch


def test_all_hooks_of_a_training_step_see_the_transformed_batch_and_evaluation_does_not():
    trained, watch = fit(Net(), Add(10.0), train_dataloaders=tensors(), val_dataloaders=tensors())
    assert trained == watch.started == watch.ended == [10.0, 11.0, 12.0]
    assert watch.evaluated == [0.0, 1.0, 0.0, 1.0, 2.0]  # the sanity check, then the validation


@pytest.mark.parametrize(
    ("module", "data", "factor"),
    [(Net, Data, 1), (Net, DataWithHook, 2), (NetWithHook, Data, 2), (NetWithHook, DataWithHook, 2)],
)
@pytest.mark.filterwarnings("ignore:You have overridden")
def test_the_transform_comes_after_the_data_hook_whoever_has_it(module, data, factor):
    trained, watch = fit(module(), Add(10.0), data=data())
    assert trained == [10.0, 10.0 + factor, 10.0 + 2 * factor]
    assert watch.evaluated[-3:] == [0.0, factor, 2 * factor]


def test_transforms_follow_their_order_not_the_callbacks():
    trained, _ = fit(Net(), Times(3.0, order=20), Add(10.0, order=10), train_dataloaders=tensors())
    assert trained == [30.0, 33.0, 36.0]
    trained, _ = fit(Net(), Times(3.0, order=5), Add(10.0, order=10), train_dataloaders=tensors())
    assert trained == [10.0, 13.0, 16.0]


def test_a_run_that_raises_leaves_the_strategy_as_it_was():
    trainer = trainer_with(Add(-5.0))
    with pytest.raises(RuntimeError, match="a negative input"):
        trainer.fit(Net(), tensors())
    assert "batch_to_device" not in vars(trainer.strategy)


def test_another_wrapper_of_the_transfer_is_kept():
    trainer = trainer_with(Add(10.0))
    original, calls = trainer.strategy.batch_to_device, []

    def wrapper(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    trainer.strategy.batch_to_device = wrapper
    module = Net()
    trainer.fit(module, tensors())
    assert module.trained == [10.0, 11.0, 12.0]
    assert len(calls) == 3
    assert trainer.strategy.batch_to_device is wrapper


def test_an_example_input_that_a_summary_runs_through_the_model_is_no_batch():
    class Example(Net):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.zeros(4, 1)
            self.sizes: list[float] = []

        def forward(self, x):
            self.sizes.append(x.sum().item())
            return self.net(x)

    module = Example()
    trainer_with(Add(10.0), ModelSummary()).fit(module, tensors())
    assert module.sizes == [0.0]
    assert module.trained == [10.0, 11.0, 12.0]


def test_a_batch_of_none_is_passed_over():
    """Lightning skips a batch that is None, and so does a transform."""
    loader = DataLoader(TensorDataset(torch.arange(3.0)), collate_fn=lambda rows: default_collate(rows) and None)
    module = Net()
    with pytest.warns(UserWarning, match="yielded None"):
        trainer_with(Add(10.0)).fit(module, loader)
    assert module.trained == []


# --- whose memory a batch is -------------------------------------------------------------------------------------


class Judge(BatchTransform):
    def transform(self, trainer, pl_module, batch):
        self.verdict = batches_are_new(trainer)
        return batch


class Batches(Dataset):
    """Returns the same tensors in each batch."""

    def __init__(self) -> None:
        self.batch = (torch.ones(3), torch.zeros(3))

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.batch

    def fetch(self, draws):
        return self.batch


class Iterable:
    def __iter__(self):
        return iter([[torch.ones(3)]])


class Declared(DataWithHook):
    makes_new_batches = True


class PlainLoader(ResumableLoader):
    def __init__(self, dataset, **options):
        super().__init__(dataset, batch_size=1, shuffle=False, drop_last=True, **options)


LOADERS = OrderedDict(
    torchs=(tensors, True),
    dicts=(lambda: DataLoader(Dicts(), batch_size=2), True),
    whole_batches=(lambda: DataLoader(Batches(), batch_size=None), False),
    own_collation=(lambda: DataLoader(Batches(), collate_fn=lambda rows: rows[0]), False),
    resumable=(lambda: PlainLoader(TensorDataset(torch.arange(3.0))), True),
    resumable_own_collation=(lambda: PlainLoader(Batches().batch, collate_fn=lambda rows: [torch.ones(3)]), False),
    resumable_batches=(lambda: PlainLoader(Batches()), False),
    any_iterable=(Iterable, False),
)


@pytest.mark.parametrize("name", LOADERS)
def test_only_torchs_collation_makes_new_batches_for_sure(name):
    make, expected = LOADERS[name]
    judge = Judge()
    trainer_with(judge).fit(Net(), make())
    assert judge.verdict is expected


@pytest.mark.parametrize(
    ("module", "data", "expected"),
    [
        (Net, Data, True),
        (Net, DataWithHook, False),
        (NetWithHook, Data, False),
        (Net, Declared, True),
        (NetWithHook, Declared, False),
    ],
)
@pytest.mark.filterwarnings("ignore:You have overridden")
def test_a_data_hook_may_keep_what_it_returns_unless_it_is_declared(module, data, expected):
    judge = Judge()
    trainer_with(judge).fit(module(), datamodule=data())
    assert judge.verdict is expected


# --- batches of any structure: their samples, and slices of them -----------------------------------------------------


Pair = namedtuple("Pair", ["x", "y"])


class Own(dict):
    """A dict of a user's own class, which torch's pytree takes for a leaf."""


def test_batch_size_looks_into_any_nest():
    assert batch_size(torch.zeros(3, 2)) == 3
    assert batch_size((torch.zeros(4, 2), torch.zeros(4))) == 4
    assert batch_size({"name": "x", "tokens": torch.zeros(5, 7)}) == 5
    assert batch_size([{"x": torch.zeros(6)}]) == 6
    assert batch_size("text") == 1
    assert find_batch_size("text") is None
    assert batch_size(({"x": torch.zeros(5, 2)}, torch.zeros(3))) == 5
    assert batch_size({"step": torch.tensor(3), "names": ["a", "b"], "x": [torch.zeros(4)]}) == 4
    assert batch_size(Own(x=torch.zeros(7))) == 7


def test_a_slice_has_the_samples_of_each_entry_and_the_structure():
    rows = torch.arange(4)
    batch = Own(
        pair=Pair(rows, [rows * 2]),
        names=["a", "b", "c", "d"],
        size=(8, 8),
        scale=torch.tensor(0.5),
        table=torch.ones(9),
    )
    part = slice_batch(batch, 1, 2)
    assert type(part) is Own
    assert type(part["pair"]) is Pair
    assert part["pair"].x.tolist() == [1, 2]
    assert part["pair"].y[0].tolist() == [2, 4]
    assert part["names"] == ["b", "c"]
    assert part["size"] == (8, 8)
    assert part["scale"] is batch["scale"]
    assert len(part["table"]) == 9
    assert part["pair"].x.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr(), "a view"
    assert batch["pair"].x is rows
