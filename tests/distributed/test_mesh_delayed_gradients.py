"""MeshStrategy with PipeDream-2BW: weights as in a simulation in one process, resumed bit for bit, without waits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from dlo_framework import ParallelPlan, Task
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.errors import DloError
from dlo_framework.finite import FiniteLoss
from dlo_framework.mesh import MeshSpec
from dlo_framework.stop import GracefulStop
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import gather_full_weights
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_framework.watch.monitor import batch_loss
from dlo_plugins.appliers.fully_shard import FullyShard
from dlo_plugins.mesh.pipeline_options import PipelineOptions
from dlo_plugins.pipeline.pipeline_engine import Pipeline
from dlo_plugins.strategies.mesh import MeshStrategy

BATCHES, ROWS, STOPS = 6, 8, (1, 4)
ACCUMULATED_STOPS = (1, 4, 5)  # In the first accumulation, after the second and in the third.
LR, DECAY = 0.05, 0.02


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Regression(Task):
    """Regression whose loss is NaN in one batch."""

    def __init__(self, nan_at: int = -1, dropout: float = 0.0) -> None:
        super().__init__()
        self.nan_at, self.dropout = nan_at, dropout

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = nn.Sequential(nn.Linear(6, 8), *(Layer() for _ in range(4)), nn.Linear(8, 1))
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = self.dropout

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("[1-4]",), stem=("0",), head=("5",), tensor={"*.up": "column", "*.down": "row"})

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        bad = self._trainer is not None and self.trainer.fit_loop.epoch_loop.batch_idx == self.nan_at
        return nn.functional.mse_loss(outputs, batch[1]) * (float("nan") if bad else 1.0)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)


class Loader:
    """Loader of a data-parallel rank's rows of each batch, which a resumed run continues where it stopped."""

    def __init__(self, place: int = 0, places: int = 1) -> None:
        draw = torch.Generator().manual_seed(1)
        self.x, self.begun = torch.randn(BATCHES, ROWS, 6, generator=draw).chunk(places, 1)[place], 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        for x in self.x[self.begun :]:
            self.begun += 1
            yield x, x.square().sum(1, keepdim=True)
        self.begun = 0

    def state_dict(self) -> dict[str, int]:
        return {"begun": self.begun}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begun = state["begun"]


def simulate(skipped: int = -1, accumulated: int = 1, clip: float = 1e9) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses and weights of W(t+1) = W(t) - lr * gradient of step t-1 at W(t-1), in one process."""
    seed_everything(4, verbose=False)
    task = Regression()
    task.configure_model()
    optimizer, losses, late = optimizer_of(task), [], None
    for number, batch in enumerate(Loader()):
        if number % accumulated == 0:
            optimizer.zero_grad()
        loss = task.loss(task.model(batch[0]), batch)
        (loss / accumulated).backward()
        if (number + 1) % accumulated:
            losses.append(loss.item())
            continue
        gradients = [parameter.grad for parameter in task.parameters()]
        if late is not None and number - 1 != skipped:
            for parameter, gradient in zip(task.parameters(), late, strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(task.parameters(), clip)
            optimizer.step()
        losses.append(loss.item())
        late = gradients
    return losses, task.state_dict()


def delayed(losses: list[float]) -> list[float]:
    return [losses[0], *losses[:-1]]


class Notes(Callback):
    """Keeps each step's loss, and writes checkpoints on the way."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.losses = folder, list[Tensor]()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = batch_loss(trainer, outputs)
        assert loss is not None
        self.losses.append(loss.detach().clone())
        if self.folder is not None and batch_idx + 1 in ACCUMULATED_STOPS:
            trainer.save_checkpoint(self.folder / f"{batch_idx + 1}.ckpt")


def trainer_of(
    ranks: int, folder: Path, *callbacks: Callback, schedule: str = "PipeDream2BW", **options: Any
) -> Trainer:
    axes = {"pp": ranks, "dp_shard": 1, **options.pop("axes", {})}
    with_defaults = add_default_callbacks(
        list(callbacks), run_folder=folder, model=Regression(), progress_bar=False, checkpoints=False
    )
    return Trainer(
        accelerator="cpu",
        devices=ranks * axes.get("tp", 1) * axes.get("dp_replicate", 1) * axes["dp_shard"],
        strategy=MeshStrategy(schedule=schedule, micro_batches=4, **axes),
        max_epochs=1,
        num_sanity_val_steps=0,
        callbacks=with_defaults,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"limit_val_batches": 0, "enable_checkpointing": False, **options},
    )


def fit(
    ranks: int,
    folder: Path,
    *callbacks: Callback,
    save: Path | None = None,
    resume: Path | None = None,
    task: Any = None,
    **options: Any,
) -> Any:
    seed_everything(4, verbose=False)
    notes = Notes(save)
    trainer = trainer_of(ranks, folder, notes, *callbacks, **options)
    spec = trainer.strategy.mesh_spec()  # type: ignore[attr-defined]
    at = spec.coordinates(trainer.global_rank)
    loaders = [Loader(at.dp_replicate * spec.dp_shard + at.dp_shard, spec.data_size) for _ in range(2)]
    trainer.fit(task or Regression(), *loaders, ckpt_path=resume)
    return notes.losses, gather_full_weights(trainer)


class NoWaits(Callback):
    """Makes the last stage wait, in each of the last steps, until the first stage has begun the next step."""

    def __init__(self) -> None:
        self.store: Any = None
        self.computed = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.store = dist.distributed_c10d._get_default_store()
        pipeline: Pipeline = trainer.strategy.pipelined.pipeline  # type: ignore[attr-defined]
        pipeline.loss_ready = self.wait

    def wait(self, loss: Tensor) -> None:
        self.computed += 1
        step, last = divmod(self.computed - 1, 4)
        if last == 3 and 2 < step < BATCHES - 1:  # In the second step, all ranks count their memory once.
            self.store.wait([f"step {step + 1}"], timedelta(seconds=60))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.pipelined.pipeline.rank == 0:  # type: ignore[attr-defined]
            self.store.set(f"step {batch_idx}", "")


def _trains(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    silence_lightning()
    found = {
        "whole": fit(2, folder, save=folder),
        "evaluated": fit(2, folder, val_check_interval=2, limit_val_batches=2),
    }
    found["noisy"] = fit(2, folder, save=folder / "noisy", task=Regression(dropout=0.3))
    for stop in STOPS:
        found[f"resumed {stop}"] = fit(2, folder, resume=folder / f"{stop}.ckpt")
        noisy = Regression(dropout=0.3)
        found[f"noisy {stop}"] = fit(2, folder, resume=folder / "noisy" / f"{stop}.ckpt", task=noisy)
    found["skipped"] = fit(2, folder, FiniteLoss(on_nan="skip"), task=Regression(nan_at=2))
    found["1F1B"] = fit(2, folder, resume=folder / "4.ckpt", schedule="1F1B")
    with pytest.raises(DloError, match=r"the loss .* was not finite in step"):
        fit(2, folder, task=Regression(nan_at=2))
    found["accumulated"] = fit(2, folder, save=folder / "accumulated", accumulate_grad_batches=2)
    found["accumulated, evaluated"] = fit(
        2, folder, accumulate_grad_batches=2, val_check_interval=3, limit_val_batches=2
    )
    for stop in ACCUMULATED_STOPS:
        resume = folder / "accumulated" / f"{stop}.ckpt"
        found[f"accumulated {stop}"] = fit(2, folder, resume=resume, accumulate_grad_batches=2)
    # GracefulStop, which `dlo fit` adds, replaces Lightning's broadcast before each batch.
    fit(2, folder, NoWaits(), GracefulStop(folder), enable_checkpointing=True)
    leave_group()
    return found


@pytest.mark.timeout(280)
def test_weights_are_those_of_a_simulation_and_resumed_runs_equal_others(tmp_path: Path) -> None:
    ranks = run_distributed(_trains, 2, tmp_path, backend=None, timeout=280, group_timeout=90)
    expected, weights = simulate()
    for found in ranks:
        losses = [float(loss) for loss in found["whole"][0]]
        assert losses == pytest.approx(delayed(expected), rel=1e-5)
        assert all(map(torch.equal, found["evaluated"][0], found["whole"][0]))
        for name in ("whole", "noisy"):
            for stop in STOPS:
                resumed = found[f"{name} {stop}" if name == "noisy" else f"resumed {stop}"]
                assert len(resumed[0]) == BATCHES - stop
                assert all(map(torch.equal, resumed[0], found[name][0][stop:])), (name, stop)
        assert len(found["1F1B"][0]) == BATCHES - 4
        losses = [float(loss) for loss in found["accumulated"][0]]
        assert losses == pytest.approx(delayed(simulate(accumulated=2)[0]), rel=1e-5)
        assert all(map(torch.equal, found["accumulated, evaluated"][0], found["accumulated"][0]))
        for stop in ACCUMULATED_STOPS:
            resumed = found[f"accumulated {stop}"][0]
            assert len(resumed) == BATCHES - stop
            assert all(map(torch.equal, resumed, found["accumulated"][0][stop:])), stop
    for name, value in simulate(accumulated=2)[1].items():
        torch.testing.assert_close(ranks[0]["accumulated"][1][name], value, rtol=1e-5, atol=1e-5)
        assert torch.equal(ranks[0]["accumulated, evaluated"][1][name], ranks[0]["accumulated"][1][name])
        for stop in ACCUMULATED_STOPS:
            assert torch.equal(ranks[0][f"accumulated {stop}"][1][name], ranks[0]["accumulated"][1][name]), stop
    full = ranks[0]["whole"][1]
    assert full.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(full[name], value, rtol=1e-5, atol=1e-5)
        assert torch.equal(ranks[0]["resumed 4"][1][name], full[name])
        assert torch.equal(ranks[0]["noisy 1"][1][name], ranks[0]["noisy"][1][name])
    for name, value in simulate(skipped=2)[1].items():
        torch.testing.assert_close(ranks[0]["skipped"][1][name], value, rtol=1e-5, atol=1e-5)


#: Axes beside pp=2, and other options. The norm of the gradients is over all ranks.
BESIDE: dict[str, dict[str, Any]] = {
    "dp_replicate": {"axes": {"dp_replicate": 2}, "gradient_clip_val": 0.5},
    "dp_shard": {"axes": {"dp_shard": 2}, "gradient_clip_val": 0.5},
    "dp_shard, accumulated": {"axes": {"dp_shard": 2}, "accumulate_grad_batches": 2},
    "tp": {"axes": {"tp": 2}, "gradient_clip_val": 0.5},
}


def _with_others(rank: int, world_size: int, folder: Path) -> Any:
    silence_lightning()
    found = {name: fit(2, folder, save=folder / name, **options) for name, options in BESIDE.items()}
    for name in ("dp_replicate", "dp_shard"):
        found[f"{name}, resumed"] = fit(2, folder, resume=folder / name / "4.ckpt", **BESIDE[name])
    found["from 1F1B"] = fit(2, folder, resume=folder / "dp_shard" / "4.ckpt", schedule="1F1B", axes={"dp_shard": 2})
    leave_group()
    return found


@pytest.mark.timeout(280)
def test_it_goes_with_data_and_tensor_parallelism(tmp_path: Path) -> None:
    ranks = run_distributed(_with_others, 4, tmp_path, backend=None, timeout=280, group_timeout=90)
    for name, options in BESIDE.items():
        expected, simulated = simulate(
            accumulated=options.get("accumulate_grad_batches", 1), clip=options.get("gradient_clip_val", 1e9)
        )
        losses = [[float(loss) for loss in found[name][0]] for found in ranks]
        mean = [sum(step) / len(step) for step in zip(*losses, strict=True)]
        assert mean == pytest.approx(delayed(expected), rel=1e-5), name
        assert (losses[0] != losses[1]) == ("dp" in name), "data-parallel ranks have other rows"
        for key, value in simulated.items():
            torch.testing.assert_close(ranks[0][name][1][key], value, rtol=1e-5, atol=1e-5)
    for name in ("dp_replicate", "dp_shard"):
        for key, value in ranks[0][name][1].items():
            assert torch.equal(ranks[0][f"{name}, resumed"][1][key], value), (name, key)
    assert len(ranks[0]["from 1F1B"][0]) == BATCHES - 4


def test_a_description_counts_both_versions_of_full_parameters() -> None:
    found = {}
    for schedule in ("1F1B", "PipeDream2BW"):
        strategy = MeshStrategy(pp=2, dp_shard=2, schedule=schedule)
        Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False)
        found[schedule] = [rank.state_bytes for rank in strategy.describe(Regression()).ranks]
    for rank, (plain, late) in enumerate(zip(found["1F1B"], found["PipeDream2BW"], strict=True)):
        pair = found["1F1B"][rank // 2 * 2 : rank // 2 * 2 + 2]  # The two shards of a stage.
        full = sum(state.parameters for state in pair)
        assert late.parameters == full * (2 if rank < 2 else 1)
        assert late.gradients == 2 * full
        assert late.optimizer == plain.optimizer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp": 2}, r"cp must be 1 for PipeDream2BW, .* got 2; set cp to 1 and dp_shard to 2, or"),
        ({"appliers": [FullyShard(param_dtype="bfloat16")]}, r"FullyShard must have no offload and no param_dtype"),
        ({"micro_batches": 1}, r"micro_batches must be at least 2, the number of stages, for PipeDream2BW"),
    ],
)
def test_what_it_cannot_run_is_refused(options: dict[str, Any], message: str) -> None:
    strategy = MeshStrategy(**{"pp": 2, "dp_shard": 1, "schedule": "PipeDream2BW", **options})
    with pytest.raises(DloError, match=message):
        Trainer(accelerator="cpu", devices=2 * options.get("cp", 1), strategy=strategy, logger=False)


def test_a_loss_scale_is_refused() -> None:
    options = PipelineOptions("PipeDream2BW")
    with pytest.raises(
        DloError, match=r"precision must be without a loss scale for PipeDream2BW, .* got 16-mixed; set"
    ):
        options.check_delay(MeshSpec(pp=2, dp_shard=1), "16-mixed", needs_fsdp=False)
