import json
import math
import random
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dlo_framework.data import ResumableDataModule
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.batches.micro_batch_finder import (
    ActivationBudget,
    MicroBatchFinder,
    concat_batches,
    count_samples,
    find_largest,
    is_out_of_memory,
    keep_global_batch,
)
from dlo_plugins.images.progressive_resizing import ProgressiveResizing
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.schedules.lr_finder import LRFinder
from dlo_tasks.imagenet.digits import DigitsData
from support.noisy_data import Noisy
from support.runs import Losses
from support.trainers import quiet_trainer


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Net(LightningModule):
    """Runs out of memory above that many samples, in one of the passes, as an accelerator would."""

    def __init__(self, bound: int = 10**9, where: str = "forward") -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)
        )
        self.bound, self.where, self.sizes = bound, where, Seen()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.sizes.seen.append(len(x))
        outputs = self.net(x)
        if len(x) > self.bound:
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            outputs = FailingBackward.apply(outputs)
        return torch.nn.functional.cross_entropy(outputs, y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Seen:
    """What must not be put back: an object that no snapshot looks into."""

    def __init__(self) -> None:
        self.seen: list[int] = []


class Data(ResumableDataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=20, num_workers=0)

    def train_dataloader(self):
        return self.train_loader(Noisy(200))


def fit(folder, *callbacks, make=Net, data=None, **options):
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    module, losses = make(), Losses()
    options = {"max_epochs": 1, "default_root_dir": folder, **options}
    quiet_trainer(callbacks=[*callbacks, losses], **options).fit(module, Data() if data is None else data)
    return losses.found, module


AMPLE = 10**12


@pytest.mark.parametrize(("where", "accumulate"), [("forward", 3), ("backward", 1)])
def test_it_finds_the_bound_and_leaves_nothing(tmp_path, where, accumulate, capsys):
    expected, _ = fit(tmp_path, accumulate_grad_batches=accumulate)
    finder = MicroBatchFinder(memory_limit_bytes=AMPLE, margin=0.0, steps_per_trial=2)
    found, module = fit(tmp_path, finder, make=lambda: Net(70, where), accumulate_grad_batches=accumulate)
    assert finder.per_rank == 70
    assert found == expected
    assert module.sizes.seen[:3] == [20, 20, 40]
    report = json.loads((tmp_path / "batch_size.json").read_text())
    assert (report["per_rank"], report["bound"]) == (70, "memory")
    assert (report["batch_size"], report["accumulate_grad_batches"]) == (20 if accumulate == 1 else 60, 1)
    assert f"data.init_args.batch_size: {report['batch_size']}" in capsys.readouterr().out


def test_the_margin_the_powers_and_the_limits(tmp_path):
    def found(bound, **options):
        finder = MicroBatchFinder(memory_limit_bytes=AMPLE, steps_per_trial=1, **options)
        fit(tmp_path, finder, make=lambda: Net(bound))
        return finder.per_rank

    assert found(70) == 66
    assert found(70, power_of_two=True) == 64
    with pytest.raises(torch.OutOfMemoryError):  # The batch stays as the config has it, in training too.
        found(13, margin=0.0)
    assert json.loads((tmp_path / "batch_size.json").read_text())["per_rank"] == 13
    assert found(10**9) == 200  # the data
    assert found(10**9, max_size=50) == 50


def test_a_budget_of_bytes(tmp_path):
    sizes = []
    for limit in (20_000, 40_000):
        finder = MicroBatchFinder(memory_limit_bytes=limit, margin=0.0)
        fit(tmp_path, finder)
        sizes.append(finder.per_rank)
    assert 30 < sizes[0] < 150
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.1)


def test_sizes_are_tried_by_their_predicted_memory_where_ranks_communicate(tmp_path):
    """The size of one process, without a step that exceeds the limit by more than its own first one."""

    def found(limit, **options):
        finder = MicroBatchFinder(memory_limit_bytes=limit, margin=0.0)
        losses, module = fit(tmp_path, finder, devices=1, **options)
        return finder, losses, module.sizes.seen

    expected = fit(tmp_path, strategy=ZeroStrategy(2), devices=1)[0]
    for limit in (3_000, 20_000, 10**12):
        finder, losses, sizes = found(limit, strategy=ZeroStrategy(2))
        assert finder.per_rank == found(limit)[0].per_rank
        assert max(sizes) == max(20, finder.per_rank)
        assert losses == expected
    with pytest.raises(DloError, match="set memory_limit_bytes"):
        fit(tmp_path, MicroBatchFinder(), strategy=ZeroStrategy(2), devices=1)
    with pytest.raises(DloError, match="at least one sample a rank must fit in memory"):
        found(1, strategy=ZeroStrategy(2))


def test_who_can_use_it_is_told_and_the_rate_is_sought_after(tmp_path, capsys):
    order = []

    class Told(Callback):
        def set_max_micro_batch(self, per_rank):
            order.append(per_rank)

        def on_train_epoch_start(self, trainer, pl_module):
            order.append("epoch")

    class Rate(LRFinder):
        def before_training(self, trainer, pl_module):
            order.append("rate")

    finder = MicroBatchFinder(memory_limit_bytes=AMPLE, power_of_two=True)
    fit(tmp_path, Told(), Rate(), finder, make=lambda: Net(70))
    assert order == [64, "rate", "epoch"]
    assert "set in Told" in capsys.readouterr().out


class Pixels(LightningModule):
    """Runs out of memory above that many pixels in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    def training_step(self, batch, batch_idx):
        if batch[0].numel() > 20_000:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return torch.nn.functional.cross_entropy(self.net(batch[0][:, :1]), batch[1] % 4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("sized_by_data", [True, False])
def test_images_have_their_last_size(tmp_path, sized_by_data):
    """Sixteen pixels from the middle of the run on, made by the data or on the device; a quarter of them before."""
    finder = MicroBatchFinder(memory_limit_bytes=AMPLE, margin=0.0, steps_per_trial=1)
    resizing = ProgressiveResizing(sizes={0: 8, "50%": 16})
    if sized_by_data:
        data = DigitsData(image_size=16, batch_size=8, num_workers=0)
        channels = 3
    else:
        images = torch.randn(200, 1, 16, 16)
        data = DataLoader(TensorDataset(images, torch.zeros(200, dtype=torch.long)), batch_size=8)
        channels = 1
    fit(tmp_path, resizing, finder, make=Pixels, data=data, max_epochs=2, limit_train_batches=3, limit_val_batches=0)
    assert finder.per_rank == 20_000 // (channels * 16 * 16)


def test_a_stream_needs_a_limit(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.randn(6), 0)] * 8)

    with pytest.raises(DloError, match="set max_size"):
        fit(tmp_path, MicroBatchFinder(memory_limit_bytes=AMPLE), data=DataLoader(Stream(), batch_size=4))
    finder = MicroBatchFinder(memory_limit_bytes=AMPLE, max_size=32)
    fit(tmp_path, finder, data=DataLoader(Stream(), batch_size=4))
    assert finder.per_rank == 32


def test_a_cpu_without_a_budget_and_manual_optimization_are_refused(tmp_path):
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(DloError, match="set memory_limit_bytes"):
        fit(tmp_path, MicroBatchFinder())
    with pytest.raises(DloError, match="remove MicroBatchFinder"):
        fit(tmp_path, MicroBatchFinder(memory_limit_bytes=1), make=Manual)


class Uneven(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1:  # Saves more than the other rank does.
            loss = loss + 0 * (batch[0].repeat(1, 9).requires_grad_() ** 2).sum()
        return loss


class OneFails(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and len(batch[0]) > 24 and self.where == "backward":
            self.bound = 24
        if self.global_rank == 0 and len(batch[0]) > 37 and self.where == "forward":
            self.bound = 37
        return super().training_step(batch, batch_idx)


def _find_on_two(rank, world_size, folder):
    """Returns the trials of each search; losses are those without one."""

    def run(*callbacks, strategy="ddp", **options):
        return fit(folder, *callbacks, strategy=strategy, devices=2, **options)

    trials = []
    expected, _ = run()
    for where, bound in (("forward", 37), ("backward", 24)):
        finder = MicroBatchFinder(memory_limit_bytes=AMPLE, margin=0.0)
        losses, module = run(finder, make=lambda where=where: OneFails(10**9, where))
        assert finder.per_rank == bound, (finder.per_rank, where)
        assert losses == expected, where
        trials.append(str(finder.trials))
    for strategy in (lambda: ZeroStrategy(3), FSDPStrategy):
        expected, _ = run(strategy=strategy())
        finder = MicroBatchFinder(memory_limit_bytes=20_000, margin=0.0)
        losses, module = run(finder, make=Uneven, strategy=strategy())
        assert 20 < finder.per_rank < 60, finder.trials
        assert losses == expected
        assert max(module.sizes.seen) <= finder.per_rank
    return trials


@pytest.mark.slow
def test_one_rank_of_two_runs_out_of_memory_and_both_go_on(tmp_path):
    first, second = run_distributed(_find_on_two, 2, tmp_path, backend=None)
    assert first == second
    assert all("False" in trials for trials in first)


def test_the_picture_is_what_the_search_draws():
    docs = Path(__file__).resolve().parents[3] / "docs"
    drawn = runpy.run_path(str(docs / "pictures" / "micro_batch_finder.py"))["draw"]()
    assert (docs / "images/micro-batch-finder.svg").read_text() == drawn


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 300), st.booleans())
def test_the_largest_is_found_in_few_trials(bound, start, limit, powers):
    tried = []

    def fits(size):
        assert 1 <= size <= limit
        tried.append(size)
        return size <= bound

    top = min(bound, limit)
    expected = 2 ** int(math.log2(top)) if top and powers else top
    assert find_largest(fits, start, limit, powers=powers) == expected
    assert not powers or all(size.bit_count() == 1 for size in tried)
    assert len(tried) == len(set(tried)) <= 2 * math.log2(limit) + 3


@pytest.mark.parametrize(
    ("batch_size", "per_rank", "world_size", "expected"),
    [(512, 100, 2, (128, 4)), (512, 1000, 2, (512, 1)), (96, 7, 1, (6, 16)), (14, 6, 2, (2, 7))],
)
def test_the_same_step_of_the_largest_equal_micro_batches(batch_size, per_rank, world_size, expected):
    assert keep_global_batch(batch_size, per_rank, world_size) == expected


def test_errors_that_mean_that_memory_has_run_out():
    with pytest.raises(RuntimeError) as from_torch:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(from_torch.value)
    with pytest.raises(MemoryError) as from_numpy:
        np.ones(2**60, dtype=np.uint8)
    assert is_out_of_memory(from_numpy.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))
    assert not is_out_of_memory(ValueError("out of memory"))
    error = RuntimeError("the compiler failed")
    error.__cause__ = ValueError("shapes")
    assert not is_out_of_memory(error)
    error.__cause__.__cause__ = MemoryError()
    assert is_out_of_memory(error)


def test_the_budget_counts_what_is_kept_for_the_backward_pass():
    """Of x W relu W2: the input and the relu's output, which the second layer shares; not the weights."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    needed = 10 * (4 + 8) * 4

    def keeps(limit):
        with ActivationBudget(limit, module):
            return module(torch.randn(10, 4)).sum()

    keeps(needed).backward()
    keeps(None).backward()
    with pytest.raises(torch.OutOfMemoryError, match="memory_limit_bytes"):
        keeps(needed - 1)
    keeps(needed).backward()  # The count of bytes starts at 0 again.


def test_samples_of_different_shapes_are_refused():
    with pytest.raises(DloError, match="must have one shape"):
        concat_batches([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(DloError, match="got a str"):
        count_samples("text")
