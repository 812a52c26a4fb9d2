"""Bad losses and unequal loaders: all ranks do the same about them, and none waits for the others for ever."""

import contextlib
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dlo_framework import finite
from dlo_framework.checkpoint import step_of
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.distributed.equal_batches import EqualBatches
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError, is_agreed
from dlo_framework.finite import FiniteLoss
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.on_ranks import on_ranks
from support.trainers import Squares, quiet_trainer

WIDTH, BATCHES, BAD = 8, 10, 6
STRATEGIES = {"ddp": DataParallelStrategy, "zero3": lambda: ZeroStrategy(stage=3)}


class Net(Squares):
    def __init__(self, norm: bool = False) -> None:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
        super().__init__(*([torch.nn.BatchNorm1d(WIDTH)] if norm else []), *layers)
        self.validated = 0

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])
        self.validated += 1

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter([(torch.full((WIDTH,), float(number)),) for number in range(self.size)])


def loader(size: int, bad: list[int] | None = None, batch_size: int = 1) -> DataLoader:
    x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(2))
    for batch in bad or []:
        x[batch * batch_size, 3] = float("nan")
    return DataLoader(TensorDataset(x), batch_size=batch_size)


def fit(make, train, *callbacks, world_size: int, validate=None, norm: bool = False, **options):
    """Returns the trainer of a fit, and the error that ended it."""
    trainer = quiet_trainer(
        devices=world_size,
        strategy=make() if make else "auto",
        max_epochs=1,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        **options,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Net(norm), train, validate)
    except DloError as error:
        return trainer, str(error) if is_agreed(error) else f"not agreed on: {error}"
    return trainer, ""


def outcome(trainer, error: str) -> tuple:
    """Returns this rank's part of the weights, the optimizer's steps, the run's, and the error."""
    held = [tensor.clone() for tensor in trainer.strategy.local_tensors()]
    steps = {float(state["step"]) for optimizer in trainer.optimizers for state in optimizer.state.values()}
    return held, steps, trainer.global_step, error


# --- losses that are not numbers -------------------------------------------------------------------------------


def check_alike(tensors: list) -> None:
    """Asserts that the first rank's tensors are this rank's, to the bit."""
    for tensor in tensors:
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)


@on_ranks(2)
def test_a_bad_loss_on_one_rank_reaches_no_weight(rank: int, world_size: int) -> None:
    for name, make in STRATEGIES.items():
        train = loader(BATCHES, [BAD] if rank == 1 else None)
        weights, steps, _, error = outcome(*fit(make, train, FiniteLoss("stop"), world_size=world_size))
        assert "the loss of rank 1 was not finite in step 7 (epoch 1, batch 7)" in error
        assert steps == {BAD}
        skipped, *counts = outcome(*fit(make, train, FiniteLoss("skip"), world_size=world_size))
        assert counts == [{BATCHES - 1}, BATCHES, ""]
        options = {"accumulate_grad_batches": 5, "world_size": world_size}
        window, *counts = outcome(*fit(make, train, FiniteLoss("skip"), **options))
        assert counts[:2] == [{1}, 2]
        assert all(bool(tensor.isfinite().all()) for tensor in (*weights, *skipped, *window))
        # A step that was left out has left nothing behind: not in the weights, not in the moments.
        kept = [number for number in range(BATCHES) if number != BAD]
        rest = DataLoader(torch.utils.data.Subset(loader(BATCHES).dataset, kept))
        without, *_ = outcome(*fit(make, rest, world_size=world_size))
        assert all(map(torch.equal, skipped, without)), name
        check_alike([*weights, *skipped, *window] if name == "ddp" else [])
    endless = loader(BATCHES, list(range(2, BATCHES)) if rank == 1 else None)
    weights, steps, _, error = outcome(*fit(STRATEGIES["ddp"], endless, FiniteLoss("skip", 3), world_size=world_size))
    assert "3 steps in a row were skipped" in error
    assert steps == {2}
    check_alike(weights)
    poison = loader(2 * BATCHES, [BAD] if rank == 1 else None, batch_size=2)
    _, error = fit(STRATEGIES["ddp"], poison, FiniteLoss("skip"), norm=True, world_size=world_size)
    assert "neither is the buffer net.0.running_mean now" in error


def test_a_bad_loss_in_a_single_process():
    _, error = fit(None, loader(BATCHES, [BAD]), FiniteLoss(), world_size=1)
    assert error.startswith("the loss was not finite in step 7 (epoch 1, batch 7); the weights are those before it")
    skipping = FiniteLoss("skip")
    trainer, error = fit(None, loader(BATCHES, [BAD]), skipping, world_size=1)
    assert (error, skipping.skipped, trainer.global_step) == ("", 1, BATCHES)
    ignoring = FiniteLoss("ignore")
    trainer, error = fit(None, loader(BATCHES, [BAD]), ignoring, world_size=1)
    assert error == ""
    assert not any(bool(p.isfinite().all()) for p in trainer.lightning_module.parameters())


class PoisonedNet(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == BAD:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("saves_at", [BAD + 1, 2 * BATCHES])
def test_a_nan_gradient_of_a_finite_loss_reaches_no_checkpoint(tmp_path, monkeypatch, late, saves_at):
    if late:  # As on an accelerator, where the norm is known after the step only.
        monkeypatch.setattr(finite._Flag, "is_known", False)
    module, at, path = PoisonedNet(), [], tmp_path / "last.ckpt"

    class Save(Callback):
        def on_train_batch_end(self, trainer, *_):
            at.append(trainer.global_step)
            if trainer.global_step in (BAD, saves_at):
                trainer.save_checkpoint(path)

    trainer = quiet_trainer(max_epochs=1, callbacks=[FiniteLoss(), Save()])
    with pytest.raises(DloError, match=r"the gradient .*was not finite in step 7 ") as caught:
        trainer.fit(module, loader(BATCHES))
    assert ("the weights are those before it" in str(caught.value)) == (not late)
    assert ("the weights have it, checkpoints have not" in str(caught.value)) == late
    assert all(bool(p.isfinite().all()) for p in module.parameters()) == (not late)
    assert at == list(range(1, BAD + 1 + late))
    assert torch.load(path, weights_only=True)["global_step"] == BAD


def _saves(rank: int, world_size: int, folder: Path) -> dict[str, float]:
    found = {}
    for name, minutes, bad in (("time", 1e-9, None), ("all", 10.0, BAD)):
        path, train = folder / name, loader(BATCHES, [bad] if bad and rank else None)
        path.mkdir(exist_ok=True)
        callbacks = add_default_callbacks([], run_folder=path, model=Net(), progress_bar=False, save_minutes=minutes)
        steps = {"max_steps": BAD} if bad is None else {}
        steps |= {"max_epochs": 1, "enable_checkpointing": True, "use_distributed_sampler": False}
        trainer = quiet_trainer(devices=world_size, strategy=ZeroStrategy(3), callbacks=callbacks, **steps)
        saves = trainer.strategy.save_checkpoint = mock.Mock(wraps=trainer.strategy.save_checkpoint)
        with contextlib.suppress(DloError):
            trainer.fit(Net(), train)
        found[name] = [call.args[0]["global_step"] for call in saves.call_args_list]
        found[f"{name} step"] = step_of(path / "checkpoints" / "last.ckpt")
    return found


def test_ranks_save_by_time_and_after_an_error_that_all_raise(tmp_path):
    ranks = run_distributed(_saves, 2, tmp_path)
    assert ranks[0] == ranks[1]
    assert ranks[0]["time"] == [2, 3, 4, 5, BAD]  # Agreed on a step later: not in the first.
    assert (ranks[0]["time step"], ranks[0]["all"], ranks[0]["all step"]) == (BAD, [BAD], BAD)


def test_options_are_checked():
    with pytest.raises(DloError, match="on_nan must be one of stop, skip, ignore, got explode"):
        FiniteLoss("explode")
    with pytest.raises(DloError, match="max_skipped must be at least 1, got 0"):
        FiniteLoss("skip", 0)


# --- ranks with different numbers of batches -------------------------------------------------------------------


@on_ranks(2)
def test_ranks_with_different_numbers_of_batches_end_with_an_error(rank: int, world_size: int) -> None:
    own = 7 if rank == 0 else 10
    for name, make in STRATEGIES.items():
        for train, message, steps in (
            (loader(own), "number of training batches, got 7, 10 on ranks 0 to 1.*limit_train_batches to 7 or less", 0),
            # Before the first batch that is some ranks' last.
            (DataLoader(Stream(own)), "got 7 on rank 0 and more on the others", 6),
        ):
            trainer, error = fit(make, train, EqualBatches(), world_size=world_size)
            assert re.search(message, error), error
            assert trainer.global_step == steps
            trainer, error = fit(make, train, EqualBatches(), world_size=world_size, limit_train_batches=7)
            assert (trainer.global_step, error) == (7, "")
        options = {"validate": loader(own), "world_size": world_size, "num_sanity_val_steps": 0}
        trainer, error = fit(make, loader(4), EqualBatches(), **options)
        if name == "ddp":  # Its forward pass needs nobody else.
            assert (trainer.lightning_module.validated, error) == (own, "")
        else:
            assert "validation batches, got 7, 10 on ranks 0 to 1" in error
            assert trainer.lightning_module.validated == 0
