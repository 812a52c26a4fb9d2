"""Stopping a real Lightning run anywhere and resuming it; loading processes and requests to stop."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dlo_framework.data import ResumableDataModule, ResumableLoader, ignore_stop_signals
from dlo_framework.data.loader import stop_signals_held
from dlo_framework.data.module import data_parallel_coordinates, per_rank_batch
from dlo_framework.errors import DloError
from dlo_framework.run.resume import ExactResume, as_replayed
from support.trainers import quiet_trainer

SIZE, BATCH, EPOCHS = 40, 4, 3


class Indices(ResumableDataModule):
    def __init__(self, workers: int) -> None:
        super().__init__(batch_size=BATCH, num_workers=workers, seed=1)

    def train_dataloader(self):
        return self.train_loader(TensorDataset(torch.arange(SIZE)))

    def val_dataloader(self):
        return self.eval_loader(TensorDataset(torch.arange(10)))


class Recorder(LightningModule):
    """Records the indices of each completed step; raises or saves at given steps."""

    def __init__(self, seen: list[list[int]], asks_length: bool = False, raise_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen, self.asks_length, self.raise_at = seen, asks_length, raise_at
        self.validated: list[int] = []

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.raise_at:
            raise RuntimeError("power cut")
        self.seen.append(batch[0].tolist())
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch, batch_idx):
        self.validated += batch[0].tolist()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        if self.asks_length:  # The loaders are created here, before the checkpoint is read.
            steps = self.trainer.estimated_stepping_batches
            assert steps == SIZE // BATCH * EPOCHS
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=steps)]
        return optimizer


def run(tmp_path, model: Recorder, workers: int, *, data=None, ckpt=None, **options):
    """Trains until the end or an error, and returns a checkpoint that is saved then."""
    trainer = quiet_trainer(
        default_root_dir=tmp_path,
        callbacks=[ExactResume()],  # reopens the epoch that Lightning closes when max_steps ends a run
        **{"max_epochs": EPOCHS, "num_sanity_val_steps": 0, **options},
    )
    with contextlib.suppress(RuntimeError):
        trainer.fit(model, data or Indices(workers), ckpt_path=ckpt, weights_only=True if ckpt else None)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    return tmp_path / "stopped.ckpt"


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[list[int]]:
    seen: list[list[int]] = []
    run(tmp_path_factory.mktemp("whole"), Recorder(seen), 0)
    assert len(seen) == SIZE // BATCH * EPOCHS
    for epoch in range(EPOCHS):
        assert sorted(flat(seen[epoch * 10 : epoch * 10 + 10])) == list(range(SIZE))
    return seen


@pytest.mark.parametrize(
    ("workers", "stop", "raises", "asks_length"),
    [(0, 3, False, False), (0, 10, False, True), (2, 14, False, True), (0, 0, True, True), (0, 9, True, False)],
)
def test_stopped_by_max_steps_or_by_an_error_in_a_step_and_resumed(
    tmp_path, uninterrupted, workers: int, stop: int, raises: bool, asks_length: bool
) -> None:
    seen: list[list[int]] = []
    how = (Recorder(seen, raise_at=stop), -1) if raises else (Recorder(seen), stop)
    path = run(tmp_path, how[0], workers, max_steps=how[1])
    assert len(seen) == stop
    run(tmp_path, Recorder(seen, asks_length), workers, ckpt=path)
    assert seen == uninterrupted


def test_a_limited_epoch_is_resumed_within_its_limit(tmp_path) -> None:
    whole: list[list[int]] = []
    run(tmp_path, Recorder(whole), 0, limit_train_batches=7)
    seen: list[list[int]] = []
    path = run(tmp_path, Recorder(seen), 0, max_steps=10, limit_train_batches=7)
    run(tmp_path, Recorder(seen), 0, ckpt=path, limit_train_batches=7)
    assert seen == whole


def test_overfit_batches_repeats_the_same_batches(tmp_path) -> None:
    seen: list[list[int]] = []
    run(tmp_path, Recorder(seen), 0, overfit_batches=2)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * EPOCHS


def test_validation_sees_each_sample_once_and_ignores_the_training_place(tmp_path) -> None:
    model = Recorder([])
    run(tmp_path, model, 0)
    assert model.validated == list(range(10)) * EPOCHS


def test_validating_a_checkpoint_does_not_make_a_later_fit_skip_samples(tmp_path, uninterrupted) -> None:
    path = run(tmp_path, Recorder([]), 0, max_steps=3)
    data, seen = Indices(0), []
    model = Recorder(seen)
    quiet_trainer().validate(model, datamodule=data, ckpt_path=path, verbose=False, weights_only=True)
    quiet_trainer(max_epochs=1).fit(model, datamodule=data)
    assert seen == uninterrupted[:10]


def test_another_batch_size_in_mid_epoch_is_warned_about(tmp_path) -> None:
    data = Indices(0)
    data.batch_size = 8
    data.load_state_dict({"epoch": 0, "samples": 12, "batch_size": 4, "seed": 0})
    with pytest.warns(UserWarning, match="batch_size was 4") as caught:
        data.train_dataloader()
    assert any("seed was 0" in str(warning.message) for warning in caught)


def test_the_global_batch_is_divided_among_the_ranks() -> None:
    assert data_parallel_coordinates(None) == (0, 1)
    assert per_rank_batch(64, 4) == 16
    with pytest.raises(DloError, match=r"batch_size, the global batch, .* 4 .* got 10; set batch_size=8 or 12"):
        per_rank_batch(10, 4)
    with pytest.raises(DloError, match="num_workers must be at least 0"):
        Indices(-1)


def test_ranks_that_have_not_started_are_told_what_they_cannot_share():
    three, no_validation = (quiet_trainer(devices=3, strategy="ddp", limit_val_batches=part) for part in (1.0, 0))
    data = ResumableDataModule(batch_size=6, eval_batch_size=9)
    data.check_shares(three)
    data.eval_batch_size = 8
    with pytest.raises(DloError, match=r"eval_batch_size, the global batch, .* 3 .* got 8; set eval_batch_size=6 or 9"):
        data.check_shares(three)
    data.check_shares(no_validation)
    data.batch_size = 7
    with pytest.raises(DloError, match=r"^batch_size, the global batch, .* got 7; set batch_size=6 or 9"):
        data.check_shares(no_validation)


class Pair(ResumableDataModule):
    """Two sets in one batch, of which the shorter is iterated more often."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__(batch_size=BATCH, num_workers=0, seed=1)
        self.sizes = sizes

    def train_dataloader(self):
        second, first = (self.train_loader(TensorDataset(torch.arange(size))) for size in self.sizes)
        return CombinedLoader({"first": first, "second": second}, "max_size_cycle")


class PairRecorder(Recorder):
    def training_step(self, batch, batch_idx):
        self.seen.append(batch["first"][0].tolist() + batch["second"][0].tolist())
        return self.layer(torch.ones(1, 1)).sum()


@pytest.mark.parametrize(("sizes", "asks_length"), [((SIZE, 12), True), ((12, SIZE), False)])
def test_several_training_loaders_each_go_on(tmp_path, sizes, asks_length):
    whole: list[list[int]] = []
    run(tmp_path, PairRecorder(whole, asks_length), 0, data=Pair(sizes))
    got: list[list[int]] = []
    path = run(tmp_path, PairRecorder(got), 0, data=Pair(sizes), max_steps=SIZE // BATCH + 4)
    assert got == whole[: len(got)]
    run(tmp_path, PairRecorder(got, asks_length), 0, data=Pair(sizes), ckpt=path)
    assert got == whole
    assert len(whole) == SIZE // BATCH * EPOCHS


@pytest.mark.parametrize(("limit", "expected"), [(1.0, [4, 3, 2]), (3, [4, 3, 2]), (2, [4, 4, 1]), (0.7, [4, 4, 1])])
def test_a_last_batch_takes_samples_from_the_one_before_only_where_it_is_evaluated(
    limit: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlo_framework.data.module.data_parallel_coordinates", lambda trainer: (0, 2))
    data = Indices(workers=0)
    data.trainer = quiet_trainer(devices=1, limit_val_batches=limit)
    spans = data.eval_loader(TensorDataset(torch.arange(9))).sampler.spans_from(0)
    assert [stop - start for start, stop in spans] == expected


class Drawn(IterableDataset):
    """Yields numbers that it draws one by one."""

    def __iter__(self):
        return (float(torch.rand(())) for _ in range(6))


class Listed(DataLoader):
    """A user's own class."""

    def __iter__(self):
        return (batch.tolist() for batch in super().__iter__())


def test_a_replayed_loader_goes_on_with_the_rest_or_says_that_it_cannot() -> None:
    def first(loader: DataLoader, batches: int):
        torch.manual_seed(5)
        iteration = iter(loader)
        return [next(iteration) for _ in range(batches)], loader.state_dict(), list(iteration)

    _, state, rest = first(as_replayed(Listed(range(9), batch_size=2, shuffle=True)), 3)
    again = as_replayed(Listed(range(9), batch_size=2, shuffle=True))
    assert isinstance(again, Listed)
    again.replay(state, 3)
    torch.manual_seed(7)
    assert list(again) == rest
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(7)), "the stream is as before"
    assert sorted(flat(list(again))) == list(range(9)), "the next epoch is whole"

    other = as_replayed(Listed(range(9), batch_size=3, shuffle=True))
    other.replay(state, 2)
    with pytest.warns(UserWarning, match="its batch_size was 2 and is 3; the next epochs are complete"):
        list(other)
    _, state, _ = first(as_replayed(DataLoader(Drawn(), batch_size=2)), 2)
    drawn = as_replayed(DataLoader(Drawn(), batch_size=2))
    drawn.replay(state, 2)
    with pytest.warns(UserWarning, match="its IterableDataset draws from the global generator"):
        list(drawn)


# --- loading processes and requests to stop: signals that reach the workers too, and their effect by sender ----------


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who sent a signal")


class WhoLoads(Dataset):
    """Each item is the id of the process that loaded it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(os.getpid())


def loaded_by(loader: ResumableLoader) -> set[int]:
    return {int(pid) for batch in loader for pid in batch}


@pytest.fixture
def loader():
    loader = ResumableLoader(WhoLoads(), batch_size=4, shuffle=True, drop_last=True, num_workers=2)
    yield loader
    loader.close()


@pytest.mark.parametrize("name", ["INT", "USR1", "TERM"])
def test_a_signal_to_all_of_a_job_leaves_the_workers(loader: ResumableLoader, name: str) -> None:
    before = loaded_by(loader)
    assert len(before) == 2
    subprocess.run(["kill", f"-{name}", *map(str, before)], check=True)
    time.sleep(0.2)
    assert loaded_by(loader) == before


def test_a_signal_while_workers_start_leaves_them_and_comes_to_the_run() -> None:
    """Sent from within the start, by a process other than the run's."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: got.append(signum))
    try:
        with stop_signals_held():
            subprocess.run(["kill", "-TERM", str(os.getpid())], check=True)
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1.0,))
            worker.start()
            subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        assert got == [signal.SIGTERM]
        worker.join(10)
        assert worker.exitcode == 0, "it has slept to its end"
    finally:
        signal.signal(signal.SIGTERM, before)


def deaf(ready) -> None:
    ignore_stop_signals()
    ready.set()
    time.sleep(60)


def test_the_run_itself_can_end_a_worker() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=deaf, args=(ready,))
    worker.start()
    assert ready.wait(30)
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
