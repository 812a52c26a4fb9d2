"""The last accumulation window of an epoch: its gradient is the mean over its own batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dlo_framework.checkpoint import SafeCheckpointIO
from dlo_framework.data import ResumableDataModule
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.progress import AccumulationTail, AccumulationWindow, find_window
from dlo_framework.run.resume import ExactResume
from dlo_framework.strategy_contract import contract_of
from dlo_framework.testing import run_distributed
from dlo_plugins.gradients.clipping_and_noise import AdaptiveGradientClipping, unit_norms
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.runs import Watch
from support.trainers import Squares, quiet_trainer

BATCHES, SIZE, WIDTH = 10, 4, 6
STRATEGIES = {"ddp": DataParallelStrategy, "zero3": lambda: ZeroStrategy(stage=3)}


class Net(Squares):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


class Norms(Callback):
    """Records the full gradient's norm at each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.found.append(float(contract_of(trainer.strategy).gradient_norm(optimizer)))


class Data(ResumableDataModule):
    """BATCHES batches of two samples, over all ranks."""

    def __init__(self) -> None:
        super().__init__(batch_size=2, num_workers=0)

    def train_dataloader(self):
        return self.train_loader(TensorDataset(samples()))


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter([(row,) for row in samples()])


def samples() -> torch.Tensor:
    return torch.randn(2 * BATCHES, WIDTH, generator=torch.Generator().manual_seed(1))


def norms_of(data, *callbacks, strategy="auto", devices=1, ckpt_path=None, **options) -> list[float]:
    module, norms = Net(), Norms()
    trainer = quiet_trainer(
        devices=devices,
        strategy=strategy,
        max_epochs=options.pop("max_epochs", 2),
        accumulate_grad_batches=options.pop("accumulate_grad_batches", SIZE),
        callbacks=[AccumulationTail(), ExactResume(), norms, *callbacks],
        **options,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    assert trainer.accumulate_grad_batches == options.get("accumulate_grad_batches", SIZE)
    assert not isinstance(trainer.accumulate_grad_batches, AccumulationWindow)
    return norms.found


def true_means(batches: list[list[torch.Tensor]]) -> list[float]:
    """Returns the norms of a loop in plain torch, whose gradients are the means over their windows."""
    module, found = Net(), []
    optimizer = module.configure_optimizers()
    for epoch in batches:
        for start in range(0, BATCHES, SIZE):
            window = epoch[start : start + SIZE]
            torch.stack([module.training_step([batch], 0) for batch in window]).mean().backward()
            found.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))
            optimizer.step()
            optimizer.zero_grad()
    return found


@given(st.integers(1, 9), st.integers(1, 40))
def test_windows_cover_an_epoch_once(size, batches):
    windows = sorted({find_window(batch, size, batches) for batch in range(batches)})
    assert [batch for start, length in windows for batch in range(start, start + length)] == list(range(batches))
    assert all(length == size for _, length in windows[:-1])
    assert find_window(batches - 1, size, float("inf"))[1] == size


def test_the_last_gradient_is_the_mean_of_its_two_batches():
    whole = list(samples().split(2))
    expected = true_means([whole, whole])
    found = norms_of(DataLoader(TensorDataset(samples()), batch_size=2))
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(found) == 6
    # A loader without a length: the gradient is corrected when the window turns out to be short.
    assert norms_of(DataLoader(Stream(), batch_size=2)) == pytest.approx(expected, rel=1e-6)


class Watched(Net):
    """Records its gradients as the optimizer gets them: the module's hook runs after the callbacks'."""

    def __init__(self) -> None:
        super().__init__()
        self.ratios: list[float] = []

    def on_before_optimizer_step(self, optimizer):
        ratios = [unit_norms(p.grad) / unit_norms(p.detach()).clamp(min=1e-3) for p in self.parameters()]
        self.ratios.append(max(float(ratio.max()) for ratio in ratios))


@pytest.mark.parametrize("own", [[], [AccumulationTail()]])
def test_what_clips_gradients_finds_the_last_one_scaled_already(tmp_path, own):
    """In the order of a fit, with a loader without a length; a user's own callback replaces the default."""
    module = Watched()
    clipping = AdaptiveGradientClipping(0.01, exclude=[])
    callbacks = add_default_callbacks([*own, clipping], run_folder=tmp_path, model=module, checkpoints=False)
    assert sum(isinstance(callback, AccumulationTail) for callback in callbacks) == 1
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=SIZE, callbacks=callbacks, enable_progress_bar=True)
    trainer.fit(module, DataLoader(Stream(), batch_size=2))
    assert module.ratios == pytest.approx([0.01] * 3, rel=1e-4)


@pytest.mark.parametrize("limit", [9, 4])
def test_limits_shorten_the_epoch_and_its_last_window(limit):
    found = norms_of(DataLoader(TensorDataset(samples()), batch_size=2), limit_train_batches=limit, max_epochs=1)
    whole = list(samples().split(2))[:limit]
    module = Net()
    last = whole[(limit - 1) // SIZE * SIZE :]
    if len(whole) <= SIZE:
        torch.stack([module.training_step([batch], 0) for batch in last]).mean().backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))
        assert found == pytest.approx([norm], rel=1e-6)
    assert len(found) == -(-limit // SIZE)


def _on_ranks(rank: int, world_size: int, folder: str) -> dict[str, tuple[list[float], list[float]]]:
    """Returns, by strategy, the norms of a run, and those of one that resumes from the middle of its last window."""
    found = {}
    for name, make in STRATEGIES.items():
        path = f"{folder}/{name}.ckpt"
        options = {"devices": world_size, "use_distributed_sampler": False}
        whole = norms_of(Data(), Watch(path, batch=BATCHES - 1), strategy=make(), **options)
        found[name] = whole, norms_of(Data(), strategy=make(), ckpt_path=path, **options)
    return found


def test_two_ranks_have_the_mean_too_and_resume_inside_the_last_window(tmp_path):
    path = str(tmp_path / "one.ckpt")
    one = norms_of(Data(), Watch(path, batch=BATCHES - 1), plugins=[SafeCheckpointIO()])
    assert len(one) == 6
    assert norms_of(Data(), ckpt_path=path, plugins=[SafeCheckpointIO()]) == one[2:]
    for by_strategy in run_distributed(_on_ranks, 2, str(tmp_path)):
        for name, (whole, resumed) in by_strategy.items():
            assert whole == pytest.approx(one, rel=1e-6), name
            # An open window's gradients are saved as their mean over the ranks. ddp otherwise takes that mean once a
            # window, and so rounds in another order.
            assert resumed == (whole[2:] if name == "zero3" else pytest.approx(whole[2:], rel=1e-6)), name
