"""DiLoCo on ranks and meshes: as replicas that one process simulates by hand, and exact after a resume."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from dlo_framework.checkpoint import load
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.models.experts import MixtureOptions
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group
from dlo_plugins.compression.diloco import DiLoCo
from dlo_plugins.compression.gradient_compression import GradientCompression
from dlo_plugins.gradients.clipping_and_noise import AdaptiveGradientClipping
from dlo_plugins.prune.callback import Prune
from support.curricula_runs import apart, fit, images, prepare_texts, refusal, same, saved_state, seeded, texts
from support.on_ranks import on_ranks
from support.runs import Watch

PERIOD, LR, MOMENTUM = 3, 0.7, 0.9


class Batches(Callback):
    """Batches of this rank, the weights that validation saw, and those at the start."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.validated: list[Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.model = copy.deepcopy(pl_module.model)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append([value.clone() for value in batch])

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.validated.append(next(pl_module.model.head.parameters()).detach().clone())


def simulate(model: nn.Module, ranks: list[list[Any]], accumulate: int) -> list[dict[str, Tensor]]:
    """Returns the shared weights after each step of replicas that are trained by hand."""
    replicas = [copy.deepcopy(model) for _ in ranks]
    decays = {"pos_embed", "cls_token"}
    optimizers = []
    for replica in replicas:
        named = dict(replica.named_parameters())
        decayed = [p for name, p in named.items() if p.ndim > 1 and name not in decays]
        plain = [p for name, p in named.items() if p.ndim <= 1 or name in decays]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
        optimizers.append(torch.optim.AdamW(groups, lr=1e-2, eps=1e-4))
    shared = {name: p.detach().clone() for name, p in model.named_parameters()}
    momenta = {name: torch.zeros_like(value) for name, value in shared.items()}
    history = []
    steps = len(ranks[0]) // accumulate
    for step in range(steps):
        for replica, optimizer, batches in zip(replicas, optimizers, ranks, strict=True):
            optimizer.zero_grad()
            for pictures, labels in batches[step * accumulate : (step + 1) * accumulate]:
                (nn.functional.cross_entropy(replica.train()(pictures), labels) / accumulate).backward()
            optimizer.step()
        if (step + 1) % PERIOD == 0 or step + 1 == steps:
            for name, value in shared.items():
                mean = sum(dict(replica.named_parameters())[name].detach() for replica in replicas) / len(replicas)
                change = value - mean
                momenta[name] = MOMENTUM * momenta[name] + change
                value -= LR * (change + MOMENTUM * momenta[name])
                for replica in replicas:
                    dict(replica.named_parameters())[name].data.copy_(value)
        history.append({name: value.clone() for name, value in shared.items()})
    return history


@pytest.mark.timeout(400)
@on_ranks(2, timeout=300)
def test_it_is_replicas_by_hand(rank: int, world: int, folder: Path) -> None:
    homes = [folder / name for name in ("whole", "part", "rest")]
    for home in homes:
        home.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"batches": 8, "accumulate_grad_batches": 2, "limit_val_batches": 1}

    def train(home: Path, *callbacks: Any, **more: Any) -> Any:
        callbacks = (DiLoCo(PERIOD, LR, MOMENTUM), *callbacks)
        return fit(home, images(weight_decay=0.05), "ddp", world, callbacks, **options | more)

    seeded()
    batches = Batches()
    losses, trainer = train(homes[0], batches)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, batches.batches)
    history, near = simulate(batches.model, everyone, 2), {"rtol": 1e-4, "atol": 1e-5}
    trained = {name: p.detach() for name, p in trainer.lightning_module.model.named_parameters()}
    torch.testing.assert_close(trained, history[-1], **near)
    # After epoch 1 (four steps) the shared weights are those of the outer step after three.
    shared = [step["head.weight"] for step in (history[3], history[6])]
    torch.testing.assert_close(batches.validated[-2:], shared, **near)
    seeded()
    train(homes[1], Watch(folder / "part.ckpt", 5, stops=True))
    seeded(9)
    rest, _ = train(homes[2], ckpt_path=folder / "part.ckpt")
    assert rest == losses[10:]
    leave_group()
    assert same(*(saved_state(home / "last.ckpt") for home in (homes[0], homes[2])))
    part = load(folder / "part.ckpt")
    for name, value in history[4].items():
        torch.testing.assert_close(part["state_dict"][f"model.{name}"], value, **near)
    local = part["diloco"]["local"]["weight.model.head.weight"]
    assert local.shape[0] == 2
    assert not torch.equal(local[0], local[1])  # The ranks trained by themselves.


def _two(rank: int, world: int, folder: Path) -> None:
    seeded()
    fit(folder, images(), "ddp", 2, [DiLoCo(PERIOD), Watch(folder / "two.ckpt", 4, stops=True)], batches=4)
    for strategy in ("zero1", "fsdp", "tp"):
        with pytest.raises(DloError, match="its ranks hold one copy of the model together"):
            fit(folder, images(), strategy, 2, [DiLoCo()], check=False)


@pytest.mark.timeout(300)
def test_another_number_of_ranks_continues_and_other_strategies_are_refused(tmp_path):
    run_distributed(_two, 2, tmp_path, timeout=200)
    seeded()
    with pytest.warns(UserWarning, match="the checkpoint has the weights and optimizer states of 2 ranks"):
        fit(tmp_path, images(), "auto", 1, [DiLoCo(PERIOD)], ckpt_path=tmp_path / "two.ckpt", batches=4)


def test_what_does_not_fit_is_refused(tmp_path):
    for make, message in (
        (lambda: DiLoCo(0), "period must be at least 1 step, got 0"),
        (lambda: DiLoCo(outer_lr=0), "outer_lr must be above 0, got 0"),
        (lambda: DiLoCo(outer_momentum=1), "outer_momentum must be at least 0 and below 1, got 1"),
    ):
        with pytest.raises(DloError, match=message):
            make()
    for other in (WeightEMA(0.9), Prune(amount=0.5), GradientCompression("bf16")):
        text = refusal(lambda other=other: fit(tmp_path, images(), "auto", 1, [DiLoCo(), other]))
        assert f"DiLoCo: {type(other).__name__} must be left out" in text


# --- DiLoCo on meshes: copies of several ranks train as the single ranks of ddp do, and resume exactly ---------------


STOP = 5
OPTIONS: dict[str, Any] = {
    "batches": 8,
    "epochs": 2,
    "accumulate_grad_batches": 2,
    "limit_val_batches": 1,
    "gradient_clip_val": 0.05,
    "log_every_n_steps": 1,
    "precision": "64-true",
}


def run(folder: Path, strategy: str, world: int, name: str, *more: Any, **options: Any) -> list[float]:
    """Trains, saves `last.ckpt` in a folder of the name and returns the losses; with experts if the name has `ep`."""
    home = folder / name
    home.mkdir(exist_ok=True)
    seeded()
    logger = CSVLogger(home, name="", version="")
    experts = {"experts": MixtureOptions(count=4, aux_loss=0.0, z_loss=0.01)} if "ep" in name.split() else {}
    made = texts(folder, weight_decay=0.05, config={"tie_word_embeddings": True}, **experts)
    callbacks = [DiLoCo(PERIOD), AdaptiveGradientClipping(0.02), *more]
    found, _ = fit(home, made, strategy, world, callbacks, logger=logger, **OPTIONS | options)
    return found


def logged(folder: Path, name: str, key: str = "diloco/change") -> list[float]:
    """Returns what a run has logged."""
    head, *lines = (folder / name / "metrics.csv").read_text().splitlines()
    column = head.split(",").index(key)
    return [float(line.split(",")[column]) for line in lines if line.split(",")[column]]


def _by_rank(rank: int, world: int, folder: Path) -> str:
    for name in ("ddp", "copies", "ddp with ep"):
        run(folder, name.split()[0], world, name)
    run(folder, "copies", world, "stopped", Watch(folder / "of_ranks.ckpt", STOP, stops=True))
    return refusal(lambda: fit(folder, texts(folder), "late copies", 4, [DiLoCo()]))


COPIES = ("copies x shard", "copies x sp", "copies x pp", "copies x cp", "copies x ep")


def _by_copy(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in COPIES:
        whole = run(folder, strategy, world, strategy)
        saved = folder / f"{strategy}.ckpt"
        run(folder, strategy, world, f"{strategy} stopped", Watch(saved, STOP, stops=True))
        found[strategy] = whole, run(folder, strategy, world, f"{strategy} resumed", ckpt_path=saved)
    said = "weights and optimizer states of 2 ranks, and this run has 2 copies of"
    with pytest.warns(UserWarning, match=said) if rank == 0 else contextlib.nullcontext():
        run(folder, COPIES[0], world, "from ranks", ckpt_path=folder / "of_ranks.ckpt")
    return found


@pytest.mark.slow
def test_copies_of_two_ranks_train_as_ranks_of_ddp_do(tmp_path: Path) -> None:
    prepare_texts(tmp_path)
    refusals = run_distributed(_by_rank, 2, tmp_path, timeout=400)
    by_copy = run_distributed(_by_copy, 4, tmp_path, timeout=900)
    expected, moved = saved_state(tmp_path / "ddp" / "last.ckpt"), logged(tmp_path, "ddp")
    assert len(moved) == 3
    assert all(value > 1e-3 for value in moved)
    assert any(value > 0 for value in logged(tmp_path, "ddp", "optim/agc_clipped"))
    for name in ("copies", *COPIES):
        found = saved_state(tmp_path / name / "last.ckpt")
        if name == "copies x ep":
            expected, moved = saved_state(tmp_path / "ddp with ep" / "last.ckpt"), logged(tmp_path, "ddp with ep")
        assert max(apart(found, expected).values(), default=0.0) < 1e-12, name
        assert logged(tmp_path, name) == pytest.approx(moved, rel=1e-10), name
    for strategy in COPIES:
        # Each step before a resume is two batches of accumulation.
        assert all(resumed == whole[2 * STOP :] for whole, resumed in (found[strategy] for found in by_copy))
        assert same(*(saved_state(tmp_path / name / "last.ckpt") for name in (f"{strategy} resumed", strategy)))
        saved = load(tmp_path / f"{strategy}.ckpt")
        first, second = saved["diloco"]["local"]["0.weight.model.model.layers.0.input_layernorm.weight"]
        assert not bool((first == second).all())  # The copies trained by themselves.
        embedded, head = (saved["state_dict"][f"model.{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
        assert bool((embedded == head).all())
    assert all("its schedule applies the gradients of the step before" in text for text in refusals)
