"""Adaptive clipping, noise and skipped spikes: as published, of slices as of full tensors, and on ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import grad_norm
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dlo_framework.callback import PluginCallback
from dlo_framework.data import ResumableDataModule
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_framework.shards import FlatShard, SlicedShard, TensorSlice
from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_framework.watch.monitor import RunMonitor
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.gradients.clipping_and_noise import (
    AdaptiveGradientClipping,
    GradientNoise,
    IndexedNoise,
    add_noise_,
    agc_scales,
    noise_deviation,
    norm_scales,
)
from dlo_plugins.gradients.skip_spikes import SkipSpikes
from dlo_plugins.parallel.stepped_gradients import SteppedGradient, UnitNorms, unit_norms
from dlo_plugins.parallel.user_code import JointGradients, users_hooks
from dlo_plugins.prune.layers import last_linear, match_or_last
from support.curricula_runs import apart, fit, prepare_texts, saved_state, seeded, texts
from support.runs import fit_with_defaults
from support.trainers import quiet_trainer

SHAPES = [(8, 3, 3, 3), (8, 1, 3, 3), (5, 8), (8,), (1, 4, 6), (1,), ()]


def tensors(scale: float = 1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    return [scale * torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


# --- the mathematics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_factor", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("scale", [1.0, 1e-5, 0.0])
def test_clipping_is_timms(clip_factor, scale):
    """Weights of three sizes: at 1e-5 ``eps`` replaces most of them, at 0 all."""
    weights = [nn.Parameter(tensor) for tensor in tensors(scale)]
    gradients = [tensor.roll(1) * size for tensor, size in zip(tensors(), (1, 0.01, 3, 1e-4, 0, 1, 1), strict=True)]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    adaptive_clip_grad(weights, clip_factor=clip_factor, eps=1e-3)
    torch._foreach_mul_(gradients, agc_scales(weights, gradients, clip_factor, 1e-3))
    for weight, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-6, atol=0)
    assert gradients[0].abs().sum() > 0


def test_the_variance_of_the_noise_is_the_papers():
    assert noise_deviation(0, 0.3, 0.55) == pytest.approx(math.sqrt(0.3))
    assert noise_deviation(99, 0.01, 0.55) ** 2 == pytest.approx(0.01 / 100**0.55)
    drawn = torch.zeros(200_000)
    add_noise_({"weight": drawn}, 0.25, seed=1, step=7)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.003)
    assert float(drawn.std()) == pytest.approx(0.25, rel=0.01)


# --- in a run ----------------------------------------------------------------------------------------------


class Data(ResumableDataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=4, num_workers=0, seed=3)

    def train_dataloader(self):
        torch.manual_seed(5)
        return self.train_loader(TensorDataset(torch.randn(40, 6), torch.randint(3, (40,))))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)
        self.losses: list[float] = []
        self.gradients: list[list[torch.Tensor]] = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        """Comes after the callbacks'."""
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def run(folder, callbacks, *, resume=False, **options):
    module = Net()
    torch.manual_seed(1 if not resume else 77)
    fit_with_defaults(folder, module, Data(), callbacks, resume=resume, **{"max_epochs": 3, **options})
    return module


def every():
    return [SkipSpikes(1.1, window=2), AdaptiveGradientClipping(0.05), GradientNoise(0.01)]


@pytest.mark.parametrize("at", [4, 5])
def test_stopped_and_resumed_gives_the_losses_of_the_whole_run(tmp_path, monkeypatch, at):
    """In mid-epoch and at an epoch's end (5 steps of two batches); a resumed process may have another seed."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    whole = run(tmp_path / "whole", every(), accumulate_grad_batches=2).losses
    assert len(set(whole)) == 30
    assert whole != run(tmp_path / "taken", every()[1:], accumulate_grad_batches=2).losses
    assert whole != run(tmp_path / "none", [], accumulate_grad_batches=2).losses
    before = run(tmp_path / "cut", every(), accumulate_grad_batches=2, max_steps=at).losses
    monkeypatch.setenv("PL_GLOBAL_SEED", "8")
    after = run(tmp_path / "cut", every(), accumulate_grad_batches=2, resume=True).losses
    assert before + after == whole


def test_a_step_is_skipped_if_its_norm_is_far_above_the_median_of_the_last_ones(monkeypatch):
    """The norms of skipped steps are in the median too: the third large one in a row is taken."""
    norms = [1.0, 2.0, 3.0, 7.9, 3.0, 12.1, 40.0, 40.0, 41.0, float("nan")]
    skipped = [False, False, False, False, False, True, True, False, False, False]

    class Scaled(Net):
        def on_after_backward(self):
            total = torch.cat([p.grad.flatten() for p in self.parameters()]).norm()
            for p in self.parameters():
                p.grad.mul_(norms[self.trainer.global_step] / total)

    told: list[str] = []
    monkeypatch.setattr("dlo_plugins.gradients.skip_spikes.rank_zero_info", told.append)
    module, spikes = Scaled(), SkipSpikes(threshold=4.0, window=3)
    trainer = quiet_trainer(callbacks=[spikes], max_epochs=1)
    trainer.fit(module, datamodule=Data())
    assert [not gradients for gradients in module.gradients] == skipped
    assert spikes.skipped == 2
    assert "step 6 is skipped: its gradient norm 12.1 is 4.0 times the median of the last 3 steps" in told[0]


def test_what_the_optimizer_gets_is_clipped_but_for_the_head(tmp_path):
    limits = []

    class Watched(AdaptiveGradientClipping):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            limits.append([0.01 * unit_norms(p.detach()).clamp(min=1e-3) for p in pl_module.parameters()])
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    clipped, whole = run(tmp_path / "a", [Watched()]), run(tmp_path / "b", [])
    for step, of_step in zip(clipped.gradients, limits, strict=True):
        for gradient, limit in zip(step[:-2], of_step[:-2], strict=True):
            assert (unit_norms(gradient) <= limit * (1 + 1e-5)).all()
    assert all(torch.equal(x, y) for x, y in zip(clipped.gradients[0][-2:], whole.gradients[0][-2:], strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(clipped.gradients[0][:2], whole.gradients[0][:2], strict=True))


def test_accumulated_gradients_are_clipped_once_and_before_lightnings_own_clipping(tmp_path):
    """The window's sum counts, not each micro-batch's; ``gradient_clip_val`` then takes what is left."""
    module = run(tmp_path / "a", [AdaptiveGradientClipping(0.01, exclude=[])], accumulate_grad_batches=5, max_epochs=1)
    assert len(module.gradients) == 2
    by_hand = Net()
    by_hand.train()
    clipped = run(tmp_path / "b", [AdaptiveGradientClipping(0.01)], gradient_clip_val=1e-6, max_epochs=1)
    torch.testing.assert_close(list(clipped.parameters()), list(by_hand.parameters()), rtol=0, atol=1e-4)
    assert max(float(gradient.norm()) for gradient in clipped.gradients[0]) > 1e-3


def test_how_much_was_clipped_is_logged(tmp_path):
    logger = CSVLogger(tmp_path)
    run(tmp_path / "a", [AdaptiveGradientClipping(1e-4)], logger=logger, log_every_n_steps=5, max_epochs=1)
    rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("optim/agc_clipped")
    values = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
    assert len(values) == 2
    assert all(0.5 < value <= 1 for value in values)


# --- which parameters --------------------------------------------------------------------------------------


def test_the_last_linear_layer_is_left_out_unless_patterns_say_otherwise():
    module = Net()
    names = [name for name, _ in module.named_parameters()]

    def excluded(patterns):
        return match_or_last(patterns, names, module, "each pattern must match a parameter")

    assert excluded(None) == {"head.weight", "head.bias"}
    assert excluded([]) == set()
    assert excluded(["body.*.bias", "head"]) == {"body.0.bias", "body.2.bias", "head.weight", "head.bias"}
    with pytest.raises(DloError, match="must match a parameter, got 'hed'; did you mean 'head'"):
        excluded(["hed"])


class Own(Task):
    """Its head is registered first: only the plan tells."""

    def __init__(self, planned: bool) -> None:
        super().__init__()
        self.planned = planned
        self.configure_model()

    def configure_model(self):
        self.model = nn.ModuleDict({"out": nn.Linear(2, 2), "a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    def loss(self, outputs, batch): ...

    def parallel_plan(self):
        return ParallelPlan(blocks=("a", "b"), head=("out",)) if self.planned else super().parallel_plan()


def test_the_parallel_plan_tells_the_head():
    assert last_linear(Own(planned=True)) == "model.out"
    assert last_linear(Own(planned=False)) == "model.b"
    assert last_linear(LightningModule()) is None


def test_gradients_on_a_disk_are_refused():
    class Swapped:
        strategy = DeepSpeedBridge(stage=3, offload_optimizer="nvme", nvme_path="/tmp")

    with pytest.raises(DloError, match="got DeepSpeedBridge with offload_optimizer: nvme"):
        GradientNoise().setup(Swapped(), Net(), "fit")


# --- slices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 5), (5, 3, 4), (40,), (1, 40), (2, 3, 40), (), (3, 0)])
@pytest.mark.parametrize("chunk", [1, 6, 12, 1 << 20])
def test_a_slices_noise_is_that_of_the_full_tensor(shape, chunk, monkeypatch):
    """Rows, columns, a flat range that begins inside a row, and interleaved runs of columns, in chunks of any size."""
    monkeypatch.setattr("dlo_plugins.gradients.clipping_and_noise.CHUNK", chunk)
    full = torch.zeros(shape)
    IndexedNoise(1, 2).add_("weight", full, 0.5)
    assert not (full == 0).any()
    assert len(full.unique()) == full.numel()

    def check(shard, expected):
        IndexedNoise(1, 2).add_("weight", shard, 0.5)
        data = shard
        while not isinstance(data, torch.Tensor):
            data = data.data if isinstance(data, FlatShard) else data.shard
        assert torch.equal(data, expected)

    count = full.numel()
    for start, stop in ((0, count), (count // 3, count - 1), (1, 1)):
        if 0 <= start <= stop <= count:
            check(FlatShard(torch.zeros(stop - start), full.shape, start), full.flatten()[start:stop])
    for dim, size in enumerate(shape):
        if size > 3:
            cut = TensorSlice(dim, size, ((0, 1), (size - 2, 2)))
            check(SlicedShard(torch.zeros(cut.slice_shape(full.shape)), cut), cut.slice_tensor(full))


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("scale", [1.0, 1e-5, 0.0])
def test_norms_of_slices_clip_as_norms_of_full_tensors(scale, one_rank):
    """One rank holds each tensor in two flat halves that cut a row, under names of one parameter."""
    weights, gradients = tensors(scale), [tensor.roll(1) for tensor in tensors()]
    expected = [g * s for g, s in zip(gradients, agc_scales(weights, gradients, 0.3, 1e-3), strict=True)]
    stepped = []
    for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        half = weight.numel() // 2
        for start, stop in ((0, half), (half, weight.numel())):
            shards = [FlatShard(t.view(-1)[start:stop], t.shape, start) for t in (weight, gradient)]
            stepped.append(SteppedGradient(f"{number}", *shards))
    norms = UnitNorms([f"{number}" for number in range(len(weights))], stepped, torch.device("cpu"))
    assert norms.copies.unique().tolist() == [1.0]
    of_weights, of_gradients, is_used = norms.measure(stepped)
    assert is_used.all()
    norms.scale_(stepped, norm_scales([of_weights], [of_gradients], 0.3, 1e-3)[0])
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=0)


def _summed_in_python(model: nn.Module) -> float:
    return math.sqrt(sum(p.grad.norm().item() ** 2 for p in model.parameters()))


def _summed_in_place(model: nn.Module) -> None:
    total = torch.zeros(1)
    for parameter in model.parameters():
        total += parameter.grad.pow(2).sum()


def _written_to_places(model: nn.Module) -> None:
    norms = torch.zeros(4)
    for place, parameter in enumerate(model.parameters()):
        norms[place] = parameter.grad.data.norm()
    norms.norm()


def _each_by_itself(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, 1.0)
        parameter.grad = (parameter.grad * 0.5 + torch.randn_like(parameter)).clamp_(-1, 1)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


JOINT: tuple[Callable[[Any], Any], ...] = (
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    lambda model: nn.utils.clip_grad_norm_([*model.parameters()], 1.0, norm_type=math.inf, foreach=False),
    lambda model: nn.utils.get_total_norm(_gradients(model)),
    lambda model: torch.stack([gradient.norm() for gradient in _gradients(model)]).norm(),
    lambda model: torch.cat([gradient.flatten() for gradient in _gradients(model)]).norm(),
    lambda model: any(bool(gradient.isnan().any()) for gradient in _gradients(model)),
    lambda model: grad_norm(model, 2),
    _summed_in_python,
    _summed_in_place,
    _written_to_places,
)
SINGLE: tuple[Callable[[Any], Any], ...] = (
    lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    lambda model: torch._foreach_mul_(_gradients(model), 0.5),
    lambda model: torch._foreach_norm(_gradients(model)),
    lambda model: float(_gradients(model)[0].norm()),
    _each_by_itself,
)


def test_a_number_from_several_gradients_is_refused_where_ranks_have_others() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model(torch.randn(5, 3)).square().sum().backward()
    for use in SINGLE:
        with JointGradients("pp=2"):
            use(model)
    for use in JOINT:
        before = [gradient.clone() for gradient in _gradients(model)]
        with (
            pytest.raises(DloError, match=r"does not support pp=2: .* \(test_gradients.py:\d+\); clip by"),
            JointGradients("pp=2"),
        ):
            use(model)
        assert all(map(torch.equal, before, _gradients(model)))


class Watching(PluginCallback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None: ...


class Promising(Watching):
    reads_weights = False


def test_hooks_of_a_callback_that_promises_to_read_no_weights_are_not_watched() -> None:
    watched = users_hooks([Watching(), Promising(), RunMonitor()])
    assert [(type(owner), name) for owner, name in watched] == [(Watching, "on_train_batch_start")]


# --- adaptive clipping and noise of gradients that ranks divide: two ranks have the weights of one process -----------


#: By name: the strategy, options of the task, and those of the trainer. tests/composition has the other strategies.
CELLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # A tied embedding has a copy on both ends of a pipeline.
    "texts": (
        "pp",
        {"config": {"tie_word_embeddings": True}, "optimizer": "momentum", "optimizer_args": {}},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    ),
    "full tensors": ("tp", {"optimizer": "lamb", "optimizer_args": {}}, {}),
}


class Fractions(DummyLogger):
    """Logged fractions of clipped units."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.values += [value for name, value in metrics.items() if name == "optim/agc_clipped"]


def _runs(rank: int, world_size: int, folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the losses and the logged fractions of each cell, and of one that has neither callback."""
    found = {}
    for name, (strategy, task, options) in CELLS.items():
        for callbacks in ([AdaptiveGradientClipping(0.05), GradientNoise(1e-4, seed=5)], []):
            home = folder / f"{name} {world_size} {len(callbacks)}"
            home.mkdir(exist_ok=True)
            seeded()
            logger = Fractions()
            given = {"batches": 4, "epochs": 1, "logger": logger, "log_every_n_steps": 1, "precision": "64-true"}
            way = strategy if world_size > 1 else "auto"
            losses, _ = fit(home, texts(folder, **task), way, world_size, callbacks, **given, **options)
            found[name if callbacks else f"{name}, plain"] = losses, logger.values
            if world_size > 1 or name != "texts":
                break  # One process shows that the callbacks change something.
    return found


@pytest.mark.timeout(600)
def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    prepare_texts(tmp_path)
    (alone,) = run_distributed(_runs, 1, tmp_path, backend=None, timeout=300)
    ranks = run_distributed(_runs, 2, tmp_path, timeout=400)
    expected, plain = alone["texts"][0], alone["texts, plain"][0]
    assert expected[0] == pytest.approx(plain[0], rel=1e-12)
    assert expected[-1] != pytest.approx(plain[-1], rel=1e-4)
    for name in CELLS:
        expected, fractions = alone[name]
        assert max(fractions) > 0.05, "something is clipped"
        assert min(fractions) < 0.95, "not all is clipped"
        one, two = (saved_state(tmp_path / f"{name} {world} 2" / "last.ckpt") for world in (1, 2))
        assert not {key: value for key, value in apart(one, two).items() if value > 1e-9}, name
        for found in ranks:
            assert found[name][0] == pytest.approx(expected, rel=1e-6), name  # They are in single precision.
        assert ranks[0][name][1] == pytest.approx(fractions, abs=1e-6), name
