"""MeshStrategy with PipeDream-2BW: weights as in a simulation in one process, resumed bit for bit, without waits."""

from __future__ import annotations

import math
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
from dlo_framework.run.resume import ExactResume
from dlo_framework.stop import GracefulStop
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_framework.watch.monitor import batch_loss
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh.pipelined_task import PipelineOptions
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.pipeline.pipeline_engine import Pipeline
from dlo_tasks.language.causal_lm import CausalLM
from support.fsdp_nets import Batches, trainer
from support.runs import Watch
from support.token_batches import FAMILIES, packed_rows

BATCHES, ROWS = 6, 8
STOPS = (1, 4)  # In the first accumulation and after the second.
LR, CLIP = 0.05, 0.5
SGD = {"momentum": 0.9, "weight_decay": 0.02}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Regression(Task):
    """Regression whose loss is NaN in one batch, and whose optimizer may need full tensors."""

    def __init__(self, nan_at: int = -1, dropout: float = 0.0, needs_full: bool = False, is_late: bool = False) -> None:
        super().__init__()
        self.nan_at, self.dropout, self.needs_full, self.is_late = nan_at, dropout, needs_full, is_late

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
        kind, options = (torch.optim.Adafactor, {}) if self.needs_full else (torch.optim.SGD, SGD)
        return (late(kind) if self.is_late else kind)(self.parameters(), lr=LR, **options)


def late(kind: Any) -> Any:
    """Returns a class of optimizers that apply the gradients of the step before, if they are finite."""

    class Late(kind):  # type: ignore[misc]
        late: list[Tensor] | None = None

        def step(self, closure: Any = None) -> Any:
            loss = closure()
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            gradients = [parameter.grad for parameter in parameters]
            for parameter, gradient in zip(parameters, self.late or [None] * len(parameters), strict=True):
                parameter.grad = gradient
            super().step()
            self.late = gradients if loss.isfinite() else None
            return loss

    return Late


def loader(place: int = 0, places: int = 1) -> Batches:
    """Returns a data-parallel rank's rows of each batch."""
    draw = torch.Generator().manual_seed(1)
    own = torch.randn(BATCHES, ROWS, 6, generator=draw).chunk(places, 1)[place]
    return Batches([(x, x.square().sum(1, keepdim=True)) for x in own])


def simulate_masters(micro_batches: int = 4) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses and weights of bf16 copies of weights in single precision, in one process.

    Gradients are computed with the copies for each micro-batch, added up in single precision, and applied one step late
    to the weights, which are copied again.
    """
    seed_everything(4, verbose=False)
    task = Regression()
    task.configure_model()
    masters = {name: p.detach().clone().requires_grad_() for name, p in task.named_parameters()}
    optimizer = torch.optim.SGD(masters.values(), lr=LR, **SGD)
    losses, late = [], None
    for batch in loader():
        total, gradients = 0.0, {name: torch.zeros_like(p) for name, p in masters.items()}
        for name, parameter in task.named_parameters():
            parameter.data = masters[name].detach().bfloat16()
        for part in zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = task.loss(task.model(part[0]), part)
            found = torch.autograd.grad(loss / micro_batches, list(task.parameters()))
            for name, gradient in zip(masters, found, strict=True):
                gradients[name] += gradient.float()
            total += loss.item() / micro_batches
        losses.append(total)
        if late is not None:
            for name, parameter in masters.items():
                parameter.grad = late[name]
            nn.utils.clip_grad_norm_(masters.values(), CLIP)
            optimizer.step()
        late = gradients
    return losses, {name: p.detach() for name, p in masters.items()}


EVALUATED = {"val_check_interval": 2, "limit_val_batches": 2}


def delayed(losses: list[float]) -> list[float]:
    return [losses[0], *losses[:-1]]


class Notes(Callback):
    """Keeps each step's loss, and writes checkpoints on the way."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.losses = folder, list[Tensor]()

    def on_train_batch_end(self, trainer: Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = batch_loss(trainer, outputs)
        assert loss is not None
        self.losses.append(loss.detach().clone())
        if self.folder is not None and batch_idx + 1 in STOPS:
            trainer.save_checkpoint(self.folder / f"{batch_idx + 1}.ckpt")


def fit(
    folder: Path, *callbacks: Callback, save: Path | None = None, resume: Path | None = None, **options: Any
) -> Any:
    """Returns losses and weights; `axes` and `strategy` are options of the mesh, the others of the trainer."""
    seed_everything(4, verbose=False)
    axes = {"pp": 2, "dp_shard": 1, **options.pop("axes", {})}
    task, notes = options.pop("task", Regression()), Notes(save)
    strategy = {"schedule": "PipeDream2BW", "micro_batches": 4, **axes, **options.pop("strategy", {})}
    given = {"run_folder": folder, "model": task, "progress_bar": False, "checkpoints": False}
    own = add_default_callbacks([notes, *callbacks], **given)
    run = trainer(math.prod(axes.values()), MeshStrategy(**strategy), callbacks=own, **options)
    spec = run.strategy.mesh_spec()  # type: ignore[attr-defined]
    at = spec.coordinates(run.global_rank)
    loaders = [loader(at.dp_replicate * spec.dp_shard + at.dp_shard, spec.data_size) for _ in range(2)]
    run.fit(task, *loaders, ckpt_path=resume)
    return notes.losses, gather_full_weights(run)


def simulate(nan_at: int = -1, needs_full: bool = False, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses and weights of W(t+1) = W(t) - lr * gradient of step t-1 at W(t-1), in one process."""
    seed_everything(4, verbose=False)
    notes = Notes()
    run = trainer(1, "auto", callbacks=[notes], **options)
    run.fit(Regression(nan_at, needs_full=needs_full, is_late=True), loader())
    return [float(loss) for loss in notes.losses], gather_full_weights(run)


class NoWaits(Callback):
    """Makes the last stage wait, in each of the last steps, until the first stage has begun the next step."""

    def __init__(self) -> None:
        self.store: Any = None
        self.computed = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.store = dist.distributed_c10d._get_default_store()
        pipeline: Pipeline = trainer.strategy.engine.pipelined.pipeline  # type: ignore[attr-defined]
        pipeline.loss_ready = self.wait

    def wait(self, loss: Tensor) -> None:
        self.computed += 1
        step, last = divmod(self.computed - 1, 4)
        if last == 3 and 2 < step < BATCHES - 1:  # In the second step, all ranks count their memory once.
            self.store.wait([f"step {step + 1}"], timedelta(seconds=60))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.engine.pipelined.pipeline.rank == 0:  # type: ignore[attr-defined]
            self.store.set(f"step {batch_idx}", "")


def _trains(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found = {"whole": fit(folder, save=folder), "evaluated": fit(folder, **EVALUATED)}
    found["noisy"] = fit(folder, save=folder / "noisy", task=Regression(dropout=0.3))
    found["noisy 1"] = fit(folder, resume=folder / "noisy" / "1.ckpt", task=Regression(dropout=0.3))
    found["skipped"] = fit(folder, FiniteLoss(on_nan="skip"), task=Regression(nan_at=2))
    found["1F1B"] = fit(folder, resume=folder / "4.ckpt", strategy={"schedule": "1F1B"})
    with pytest.raises(DloError, match=r"the loss .* was not finite in step"):
        fit(folder, task=Regression(nan_at=2))
    found["accumulated"] = fit(folder, save=folder / "accumulated", accumulate_grad_batches=2)
    resume = folder / "accumulated" / "1.ckpt"
    found["accumulated 1"] = fit(folder, resume=resume, accumulate_grad_batches=2)
    # GracefulStop, which `dlo fit` adds, replaces Lightning's broadcast before each batch.
    fit(folder, NoWaits(), GracefulStop(folder), enable_checkpointing=True)
    return found


@pytest.mark.timeout(280)
def test_weights_are_those_of_a_simulation_and_resumed_runs_equal_others(tmp_path: Path) -> None:
    ranks = run_distributed(_trains, 2, tmp_path, backend=None, timeout=280, group_timeout=90)
    expected, weights = simulate()
    accumulated, accumulated_weights = simulate(accumulate_grad_batches=2)
    for found in ranks:
        assert [float(loss) for loss in found["whole"][0]] == pytest.approx(delayed(expected), rel=1e-5)
        assert [float(loss) for loss in found["accumulated"][0]] == pytest.approx(delayed(accumulated), rel=1e-5)
        assert all(map(torch.equal, found["evaluated"][0], found["whole"][0]))
        assert len(found["1F1B"][0]) == BATCHES - 4
        for name in ("noisy", "accumulated"):
            assert len(found[f"{name} 1"][0]) == BATCHES - 1
            assert all(map(torch.equal, found[f"{name} 1"][0], found[name][0][1:])), name
    full = {name: weights for name, (_, weights) in ranks[0].items()}
    assert full["whole"].keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(full["whole"][key], value, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(full["accumulated"][key], accumulated_weights[key], rtol=1e-5, atol=1e-5)
        for name in ("noisy", "accumulated"):
            assert torch.equal(full[f"{name} 1"][key], full[name][key]), name
    for key, value in simulate(nan_at=2)[1].items():
        torch.testing.assert_close(full["skipped"][key], value, rtol=1e-5, atol=1e-5)


#: Axes beside pp=2, and other options. The norm of the gradients is over all ranks.
BESIDE: dict[str, dict[str, Any]] = {
    "dp_replicate": {"axes": {"dp_replicate": 2}, "gradient_clip_val": 0.5},
    "dp_shard": {"axes": {"dp_shard": 2}, "gradient_clip_val": 0.5},
    "dp_shard, accumulated": {"axes": {"dp_shard": 2}, "accumulate_grad_batches": 2},
    "tp": {"axes": {"tp": 2}, "gradient_clip_val": 0.5},
}


#: Double precision, and half precision with master weights.
DOUBLE: dict[str, Any] = {"precision": "64-true"}
HALF: dict[str, Any] = {"precision": "bf16-mixed", "gradient_clip_val": CLIP}
#: Options with which optimizers step copies of a rank's rows.
COPIES: dict[str, dict[str, Any]] = {
    "offload": DOUBLE | {"sharding": {"offload": True}, "gradient_clip_val": CLIP},
    "offload, full tensors": DOUBLE | {"sharding": {"offload": True}, "needs_full": True},
    "param_dtype": HALF | {"sharding": {"param_dtype": "bfloat16"}},
    "masters": HALF | {"strategy": {"bf16_weights": "masters"}},
}


def _copies(folder: Path, name: str, dp_shard: int, **more: Any) -> Any:
    options = {key: value for key, value in COPIES[name].items() if key not in ("sharding", "needs_full")}
    options["task"] = Regression(needs_full=COPIES[name].get("needs_full", False))
    if "sharding" in COPIES[name]:
        options["strategy"] = {"appliers": [FullyShard(**COPIES[name]["sharding"])]}
    return fit(folder, axes={"dp_shard": dp_shard}, **options | more)


def _with_copies(rank: int, world_size: int, folder: Path, names: list[str]) -> Any:
    shards, found = world_size // 2, {}
    for name in names:
        save = folder / name
        found[name] = _copies(folder, name, shards, save=save)
        found[f"{name}, resumed"] = _copies(folder, name, shards, resume=save / "4.ckpt")
    found["param_dtype, evaluated"] = _copies(folder, "param_dtype", shards, **EVALUATED)
    # Masters of one layout are the weights of another one, which has none.
    found["moved"] = fit(folder, resume=folder / "param_dtype" / "1.ckpt", axes={"dp_shard": shards}, **HALF)
    return found


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, ["offload, full tensors", "param_dtype"]), pytest.param(4, [*COPIES], marks=pytest.mark.slow)],
)
def test_optimizers_step_copies_of_rows(tmp_path: Path, ranks: int, names: list[str]) -> None:
    """Copies in CPU memory, or of another dtype."""
    found = run_distributed(_with_copies, ranks, tmp_path, names, backend=None, timeout=280, group_timeout=90)
    for name in names:
        options = COPIES[name]
        in_double = options["precision"] == "64-true"
        of_one = {key: value for key, value in options.items() if key != "sharding"}
        expected, weights = simulate(**of_one) if in_double else simulate_masters()
        losses = [sum(step) / ranks for step in zip(*([float(x) for x in one[name][0]] for one in found), strict=True)]
        # Sums of rows are rounded in another order to bf16 where ranks have other rows.
        close = 1e-12 if in_double else 3e-3 if ranks > 2 else 1e-5
        assert losses == pytest.approx(delayed(expected), rel=max(close, 1e-6)), name  # Losses are logged in single.
        for key, value in weights.items():
            assert found[0][name][1][key].dtype == (torch.float64 if in_double else torch.float32), name
            torch.testing.assert_close(found[0][name][1][key], value, rtol=close, atol=close)
            assert torch.equal(found[0][f"{name}, resumed"][1][key], found[0][name][1][key]), (name, key)
    single = simulate(gradient_clip_val=CLIP)[0]
    assert delayed(simulate_masters()[0]) != pytest.approx(delayed(single), rel=3e-4), "bf16 weights change the losses"
    for one in found:
        assert all(map(torch.equal, one["param_dtype, evaluated"][0], one["param_dtype"][0]))
        assert len(one["moved"][0]) == BATCHES - 1


def _with_others(rank: int, world_size: int, folder: Path, names: list[str]) -> Any:
    found = {name: fit(folder, save=folder / name, **BESIDE[name]) for name in names}
    found["dp_shard, resumed"] = fit(folder, resume=folder / "dp_shard" / "4.ckpt", **BESIDE["dp_shard"])
    plain = {"strategy": {"schedule": "1F1B"}, "axes": {"dp_shard": 2}}
    found["from 1F1B"] = fit(folder, resume=folder / "dp_shard" / "4.ckpt", **plain)
    return found


@pytest.mark.timeout(280)
@pytest.mark.parametrize("names", [["dp_shard"], pytest.param([*BESIDE], marks=pytest.mark.slow)])
def test_it_goes_with_data_and_tensor_parallelism(tmp_path: Path, names: list[str]) -> None:
    ranks = run_distributed(_with_others, 4, tmp_path, names, backend=None, timeout=280, group_timeout=90)
    for name in names:
        options = BESIDE[name]
        expected, simulated = simulate(**{key: value for key, value in options.items() if key != "axes"})
        losses = [[float(loss) for loss in found[name][0]] for found in ranks]
        mean = [sum(step) / len(step) for step in zip(*losses, strict=True)]
        assert mean == pytest.approx(delayed(expected), rel=1e-5), name
        assert (losses[0] != losses[1]) == ("dp" in name), "data-parallel ranks have other rows"
        for key, value in simulated.items():
            torch.testing.assert_close(ranks[0][name][1][key], value, rtol=1e-5, atol=1e-5)
    for key, value in ranks[0]["dp_shard"][1].items():
        assert torch.equal(ranks[0]["dp_shard, resumed"][1][key], value), key
    assert len(ranks[0]["from 1F1B"][0]) == BATCHES - 4


def test_a_loss_scale_is_refused() -> None:
    options = PipelineOptions("PipeDream2BW")
    with pytest.raises(DloError, match=r"must be without a loss scale for PipeDream2BW, .* got 16-mixed; set"):
        options.check_schedule(2, "16-mixed")


# pipeDream-2BW over shards of sequences: backwards of a batch run while another one's sequences are in use


#: Options of the mesh, beside pp and cp of two; the first each time.
MESHES: dict[str, Any] = {
    "ring": dict,
    "recomputed": lambda: {"appliers": [ActivationCheckpoint()]},
    "ulysses": lambda: {"cp_method": "ulysses"},
    "offload": lambda: {"appliers": [FullyShard(offload=True)]},
    "compiled": lambda: {"appliers": [CompileBlocks(backend="aot_eager")]},
    "recomputed, compiled": lambda: {"appliers": [ActivationCheckpoint(), CompileBlocks(backend="aot_eager")]},
}
STEPS, STOP = 4, 2


class Model(CausalLM):
    def __init__(self, is_late: bool) -> None:
        super().__init__(config={"model_type": "qwen3", **FAMILIES["qwen3"]}, lr=1e-2)
        self.is_late = is_late

    def configure_optimizers(self) -> Any:
        kind = late(torch.optim.AdamW) if self.is_late else torch.optim.AdamW
        return kind(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.05)


def packed_batches() -> Batches:
    draw = torch.Generator().manual_seed(5)
    rows = [packed_rows(4, draw) for _ in range(STEPS)]
    return Batches([batch | {"tokens_in_step": (batch["labels"] != -100).sum()} for batch in rows])


def fit_packed(world: int, strategy: Any, *, is_late: bool = False, save: Path | None = None, **options: Any) -> Any:
    seed_everything(3, verbose=False)
    losses, resume = Watch(), options.pop("resume", None)
    settings = {"precision": "64-true", "gradient_clip_val": 0.5, "max_steps": STEPS, "max_epochs": -1, **options}
    run = trainer(world, strategy, callbacks=[losses, ExactResume()], **settings)
    run.fit(Model(is_late), packed_batches(), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return losses.losses, gather_full_weights(run)


def mesh(**options: Any) -> MeshStrategy:
    return MeshStrategy(**{"pp": 2, "cp": 2, "dp_shard": 1, "micro_batches": 2, "schedule": "PipeDream2BW", **options})


def _alone(rank: int, world: int) -> Any:
    return fit_packed(1, "auto", is_late=True), fit_packed(1, "auto")


def _by_mesh(rank: int, world: int, folder: Path, meshes: list[str]) -> dict[str, Any]:
    found = {name: fit_packed(world, mesh(**MESHES[name]())) for name in meshes}
    if "ring" in meshes:
        fit_packed(world, mesh(), save=folder / "half.ckpt", max_steps=STOP)
        found["resumed"] = fit_packed(world, mesh(), resume=folder / "half.ckpt")
    return found


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "meshes", [["ring"], pytest.param([*MESHES][1:], marks=pytest.mark.slow)], ids=["ring", "others"]
)
def test_sequences_of_two_batches_are_kept_apart(tmp_path: Path, meshes: list[str]) -> None:
    (late, plain), *_ = run_distributed(_alone, 1, timeout=200)
    assert late[0] != pytest.approx(plain[0], rel=1e-4), "the delay changes the losses"
    ranks = run_distributed(_by_mesh, 4, tmp_path, meshes, timeout=280, group_timeout=90)
    for found in ranks:
        for name in meshes:  # Losses are in single precision.
            assert found[name][0] == pytest.approx([late[0][0], *late[0][:-1]], rel=1e-6), name
        if "resumed" in found:  # The first loss after a resume is the mean over the ranks of cp.
            assert found["resumed"][0][0] == pytest.approx(found["ring"][0][STOP], rel=1e-6)
            assert found["resumed"][0][1:] == found["ring"][0][STOP + 1 :]
    for name in meshes:
        for key, value in late[1].items():
            torch.testing.assert_close(ranks[0][name][1][key], value, rtol=1e-9, atol=1e-9)
    if "resumed" in ranks[0]:
        assert all(torch.equal(ranks[0]["resumed"][1][key], value) for key, value in ranks[0]["ring"][1].items())
