"""Bad losses and unequal loaders: all ranks do the same about them, and none waits for the others for ever."""

import contextlib
import warnings
from pathlib import Path

import pytest
import torch
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


def outcome(trainer, error: str) -> dict:
    """Returns what is compared between ranks: weights (this rank's part of them), the optimizer's steps, the error."""
    held = [tensor.clone() for tensor in trainer.strategy.local_tensors()]
    steps = {float(state["step"]) for optimizer in trainer.optimizers for state in optimizer.state.values()}
    return {"weights": held, "steps": steps, "error": error, "global_step": trainer.global_step}


# --- losses that are not numbers -------------------------------------------------------------------------------


def _bad_losses(rank: int, world_size: int) -> dict[str, dict]:
    found = {}
    for name, make in STRATEGIES.items():
        train = loader(BATCHES, [BAD] if rank == 1 else None)
        for how in ("stop", "skip"):
            found[f"{name} {how}"] = outcome(*fit(make, train, FiniteLoss(how), world_size=world_size))
        window = {"accumulate_grad_batches": 5, "world_size": world_size}
        found[f"{name} window"] = outcome(*fit(make, train, FiniteLoss("skip"), **window))
        # Without that batch at all: what a run that skips its step has to come to.
        kept = [number for number in range(BATCHES) if number != BAD]
        rest = DataLoader(torch.utils.data.Subset(loader(BATCHES).dataset, kept))
        found[f"{name} without"] = outcome(*fit(make, rest, world_size=world_size))
    endless = loader(BATCHES, list(range(2, BATCHES)) if rank == 1 else None)
    found["endless"] = outcome(*fit(DataParallelStrategy, endless, FiniteLoss("skip", 3), world_size=world_size))
    poison = loader(2 * BATCHES, [BAD] if rank == 1 else None, batch_size=2)
    found["poison"] = outcome(*fit(DataParallelStrategy, poison, FiniteLoss("skip"), norm=True, world_size=world_size))
    return found


def test_a_bad_loss_on_one_rank_reaches_no_weight():
    ranks = run_distributed(_bad_losses, 2)
    for found in ranks:
        for name in STRATEGIES:
            stopped, skipped, window = (found[f"{name} {how}"] for how in ("stop", "skip", "window"))
            assert "the loss of rank 1 was not finite in step 7 (epoch 1, batch 7)" in stopped["error"]
            assert stopped["steps"] == {BAD}
            assert skipped["error"] == ""
            assert (skipped["steps"], skipped["global_step"]) == ({BATCHES - 1}, BATCHES)
            assert (window["steps"], window["global_step"]) == ({1}, 2)
            for case in (stopped, skipped, window):
                assert all(bool(tensor.isfinite().all()) for tensor in case["weights"])
            # A step that was left out has left nothing behind: not in the weights, not in the moments.
            for tensor, expected in zip(skipped["weights"], found[f"{name} without"]["weights"], strict=True):
                assert torch.equal(tensor, expected), name
        assert "3 steps in a row were skipped" in found["endless"]["error"]
        assert found["endless"]["steps"] == {2}
        assert "neither is the buffer net.0.running_mean now" in found["poison"]["error"]
    for name in ("ddp stop", "ddp skip", "ddp window", "endless"):
        for one, other in zip(ranks[0][name]["weights"], ranks[1][name]["weights"], strict=True):
            assert torch.equal(one, other), name


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
        saved: list[float] = []
        trainer.strategy.save_checkpoint = _noting(trainer.strategy.save_checkpoint, saved)
        with contextlib.suppress(DloError):
            trainer.fit(Net(), train)
        found[name] = saved
        found[f"{name} step"] = step_of(path / "checkpoints" / "last.ckpt")
    return found


def _noting(save, saved):
    def noted(checkpoint, *args, **options):
        saved.append(checkpoint["global_step"])
        save(checkpoint, *args, **options)

    return noted


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


def _unequal(rank: int, world_size: int) -> dict[str, str]:
    own = 7 if rank == 0 else 10
    found = {}
    for name, make in STRATEGIES.items():
        for kind, train in (("length", loader(own)), ("stream", DataLoader(Stream(own)))):
            trainer, found[f"{name} {kind}"] = fit(make, train, EqualBatches(), world_size=world_size)
            found[f"{name} {kind} steps"] = str(trainer.global_step)
            limit = {"limit_train_batches": 7, "world_size": world_size}
            trainer, found[f"{name} {kind} limited"] = fit(make, train, EqualBatches(), **limit)
            found[f"{name} {kind} limited steps"] = str(trainer.global_step)
        options = {"validate": loader(own), "world_size": world_size, "num_sanity_val_steps": 0}
        trainer, found[f"{name} validation"] = fit(make, loader(4), EqualBatches(), **options)
        found[f"{name} validated"] = str(trainer.lightning_module.validated)
    return found


def test_ranks_with_different_numbers_of_batches_end_with_an_error():
    for rank, found in enumerate(run_distributed(_unequal, 2)):
        for name in STRATEGIES:
            assert "same number of training batches, got 7, 10 on ranks 0 to 1" in found[f"{name} length"]
            assert "set trainer.limit_train_batches to 7 or less" in found[f"{name} length"]
            assert found[f"{name} length steps"] == "0"  # Before training.
            assert "got 7 on rank 0 and more on the others" in found[f"{name} stream"]
            assert found[f"{name} stream steps"] == "6"  # Before the first batch that is some ranks' last.
            for kind in ("length", "stream"):
                assert found[f"{name} {kind} limited"] == ""
                assert found[f"{name} {kind} limited steps"] == "7"
            if name == "ddp":  # Its forward pass needs nobody else.
                assert found["ddp validation"] == ""
                assert found["ddp validated"] == ("7" if rank == 0 else "10")
            else:
                assert "validation batches, got 7, 10 on ranks 0 to 1" in found[f"{name} validation"]
                assert found[f"{name} validated"] == "0"
